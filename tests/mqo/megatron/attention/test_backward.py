"""The quantized products of attention's backward pass against the oracle, in fp32."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mqo.megatron.attention import chunks
from mqo.megatron.attention.backward import BackwardOperands
from mqo.megatron.attention.choice import FusedAttentionError
from mqo.megatron.attention.paths import chunked_context
from mqo.quant.backend import ENVIRONMENT_VARIABLE, fake_quantize
from mqo.quant.config import current
from mqo.quant.formats import ATTENTION_BACKWARD, FORMATS, SITES
from mqo.quant.gemms import gemm_operands
from mqo.quant.hadamard import signs_of
from mqo.quant.labels import UNLABELED
from mqo.quant.progress import set_step
from mqo.quant.record import RECORDER
from mqo.quant.stochastic import derive_seed

from ....oracles import attention_backward as oracle
from ....oracles.hadamard import transform
from ....peak import Peak
from .conftest import Layer, largest
from .typed import assert_close, context_of, dumped, grad_of, gradients, layer_of, rows

LENGTH = 300
SHAPES = {"plain": {}, "grouped": {"groups": 2}, "MLA's heads": {"width": 24, "groups": 2}}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks of queries, and of matrices."""
    monkeypatch.setitem(chunks.BUDGET, "cpu", 2 * 32 * LENGTH)


def rounding(types, seed_of=lambda site, operand: None):
    """The rounding of whole operands by the slow reference."""

    def rounded(site, operand, array, axis):
        kind = types.get(site, "none")
        if kind == "none":
            return array
        operand_spec = current().operand_spec(site, operand, UNLABELED, kind)
        if hadamard := operand_spec.hadamard:
            # The recomputed scores have the transform of the forward pass.
            seed = seed_of("qk" if site == "qk_recompute" else site, "signs")
            signs = signs_of(hadamard, seed).numpy()
            array = np.moveaxis(transform(np.moveaxis(array, axis, -1), signs), -1, axis)
        tensor = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
        if operand_spec.spec.tile == "square":
            return in_squares(tensor, operand_spec.spec, operand).numpy()
        if operand in ("probs", "ds"):
            tensor = tensor.flatten(0, 1)  # as its elements are counted
        spec, seed = operand_spec.spec, seed_of(site, operand)
        return fake_quantize(tensor, spec, axis=axis, seed=seed).reshape(array.shape).numpy()

    return rounded


def in_squares(tensor, spec, operand):
    """Each head of each sequence in squares of its own."""
    heads = tensor if operand in ("probs", "ds") else tensor.movedim(0, -2)
    amax = tensor.abs().amax() if spec.scales_by_tensor else None
    matrices = [fake_quantize(matrix, spec, amax=amax) for matrix in heads.flatten(0, 1)]
    rounded = torch.stack(matrices).view(heads.shape)
    return rounded if operand in ("probs", "ds") else rounded.movedim(-2, 0)


def assert_as_oracle(types, tensors, rounded):
    """Each product against that of the same unrounded operands, so that equal numbers round."""
    query, key, value = (t.detach().numpy() for t in tensors)
    context = context_of(types, *tensors)
    (dquery, dkey, dvalue), kept = dumped(lambda: gradients(context, tensors))
    grad = grad_of(context).unflatten(2, (query.shape[2], -1)).numpy()
    scale, heads = Layer().softmax_scale, key.shape[2]
    shape = (query.shape[1], query.shape[2], query.shape[0], -1)
    probs, ds = (kept[name].view(shape).numpy() for name in ("dv.probs", "dq.ds"))
    assert torch.equal(kept["dq.ds"], kept["dk.ds"])
    assert_close(probs, oracle.probabilities(query, key, scale, rounded))
    assert_close(ds, oracle.of_scores(probs, grad, value, rounded))
    assert_close(dvalue, oracle.of_value(probs, grad, heads, rounded))
    assert_close(dquery, oracle.of_query(ds, key, scale, rounded))
    assert_close(dkey, oracle.of_key(ds, query, scale, heads, rounded))


def all_of(quant_type):
    return dict.fromkeys(ATTENTION_BACKWARD, quant_type)


# Every format, and every shape with a scale of blocks, of the tensor, of both and with none.
@pytest.mark.parametrize(
    ("quant_type", "shape"),
    [
        *((kind, "grouped") for kind in FORMATS),
        *((kind, "plain") for kind in ("mxfp8", "fp8_tensor_e4m3", "nvfp4", "hifp8")),
        *((kind, "MLA's heads") for kind in ("mxfp8", "fp8_tensor_e4m3", "nvfp4", "hifp8")),
    ],
)
def test_all_products_equal_the_oracle(operands, monkeypatch, shape, quant_type):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    types = all_of(quant_type)
    assert_as_oracle(types, operands(LENGTH, LENGTH, **SHAPES[shape]), rounding(types))


def seed_of(site, operand):
    own = {"site": site, "operand": operand, "layer": UNLABELED}
    return derive_seed(3, step=1, micro_batch=0, shard=0, **own)


RANDOM = rows('hadamard = 16, signs = "random"')


@pytest.mark.parametrize("quant_type", FORMATS)
@pytest.mark.parametrize(
    ("table", "shape"),
    [(RANDOM, "MLA's heads"), (rows('hadamard = 128, tile = "square"'), "grouped")],
    ids=["random signs", "squares"],
)
def test_transformed_products_equal_the_oracle(
    operands, options, monkeypatch, quant_type, table, shape
):
    """Neither the length nor the width is a multiple of the transform's size."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    options(f"[quantizer]\nseed = 3\n{table}")
    set_step(1)
    types = all_of(quant_type)
    assert_as_oracle(types, operands(LENGTH, LENGTH, **SHAPES[shape]), rounding(types, seed_of))


@pytest.mark.parametrize("quant_type", FORMATS)
def test_a_transformed_context_equals_the_oracle(operands, options, monkeypatch, quant_type):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "reference")
    options(f"[quantizer]\nseed = 3\n{RANDOM}")
    set_step(1)
    tensors = operands(LENGTH, LENGTH, groups=2)
    types = {"pv": quant_type}
    context, kept = dumped(lambda: context_of(types, *tensors))
    rounded, value = rounding(types, seed_of), tensors[2].detach().numpy()
    probs = kept["pv.probs"].view(2, 4, LENGTH, LENGTH).numpy()
    probs, value = rounded("pv", "probs", probs, -1), rounded("pv", "value", value, 0)
    weighted = np.einsum("bhqk,kbhd->qbhd", *(x.astype(float) for x in (probs, value.repeat(2, 2))))
    assert_close(context, weighted.reshape(context.shape))


@pytest.mark.parametrize("quant_type", ["mxfp4", "fp8_block", "nvfp4", "hifp8"])
@pytest.mark.parametrize("table", ["", RANDOM], ids=["plain", "transformed"])
def test_stochastic_rounding_draws_by_the_elements_place(operands, options, quant_type, table):
    options(f'[quantizer]\nrounding = "stochastic"\nseed = 3\n{table}')
    set_step(1)
    types = all_of(quant_type)
    assert_as_oracle(types, operands(LENGTH, LENGTH, groups=2), rounding(types, seed_of))


def test_each_micro_batch_draws_its_own_numbers_in_its_backward_pass(operands, options):
    options('[quantizer]\nrounding = "stochastic"\nseed = 3\n')
    tensors, types = operands(LENGTH, LENGTH), all_of("mxfp4")
    set_step(1)
    first, second = context_of(types, *tensors), context_of(types, *tensors)
    later = gradients(second, tensors)  # a pipeline may interleave them
    earlier = gradients(first, tensors)
    set_step(1)
    again = gradients(context_of(types, *tensors), tensors)
    for one, same, other in zip(earlier, again, later, strict=True):
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


CHANGED = {"qk_recompute": {0, 1, 2}, "dv": {2}, "dp": {0, 1}, "dq": {0}, "dk": {1}}


@pytest.mark.parametrize("site", ATTENTION_BACKWARD)
@pytest.mark.parametrize("forward", [{"qk": "mxfp8", "pv": "nvfp4"}, {"pv": "mxfp4"}], ids=str)
@pytest.mark.parametrize("table", ["", RANDOM], ids=["plain", "transformed"])
def test_a_type_changes_only_its_own_product(operands, options, site, forward, table):
    options(table)
    tensors = operands(LENGTH, LENGTH, groups=2)
    contexts = []
    for types in (forward, forward | {site: "mxfp4"}):
        set_step(1)
        contexts.append(context_of(types, *tensors))
    plain, typed = contexts
    assert torch.equal(plain, typed)
    before, after = gradients(plain, tensors), gradients(typed, tensors)
    assert {i for i in range(3) if not torch.equal(before[i], after[i])} == CHANGED[site]


@pytest.mark.parametrize("keys", ['hadamard = 16, signs = "random"', "hadamard = 128"])
@pytest.mark.parametrize("normalized", ["true", "false"])
@pytest.mark.parametrize(
    "backward",
    [{}, dict.fromkeys(ATTENTION_BACKWARD, "mxfp8"), {"dq": "mxfp8"}],
    ids=["forward", "all", "dq"],
)
def test_transforms_alone_change_no_product(operands, options, keys, normalized, backward):
    tensors = operands(LENGTH, LENGTH, width=24, groups=2)
    plain = context_of({}, *tensors)
    expected = plain, *gradients(plain, tensors)
    options(
        f"[quantizer]\nunnormalized_probs = {normalized}\n" + rows(f'quant_type = "none", {keys}')
    )
    context = context_of({"qk": "mxfp8", "pv": "mxfp8"} | backward, *tensors)
    for one, other in zip((context, *gradients(context, tensors)), expected, strict=True):
        assert_close(one, other.detach().double().numpy())


@pytest.mark.parametrize("normalized", [True, False])
def test_probabilities_are_rounded_as_the_softmax_returns_them(operands, options, normalized):
    if not normalized:
        options("[quantizer]\nunnormalized_probs = true\n")
    tensors = operands(LENGTH, LENGTH, groups=2)
    context = context_of({"pv": "mxfp8", "dv": "mxfp4"}, *tensors)
    _, kept = dumped(lambda: gradients(context, tensors))
    assert_close(kept["dv.probs"].sum(-1), np.ones((8, LENGTH)))


@pytest.mark.parametrize("quant_type", ["mxfp8", "nvfp4", "fp8_tensor"])
@pytest.mark.parametrize("table", ["", RANDOM], ids=["plain", "transformed"])
def test_half_precision_is_as_near_as_its_dtype(operands, options, quant_type, table):
    options(table)
    layer, types = Layer(), all_of(quant_type)
    layer.scale_mask_softmax.input_in_float16 = True
    half = operands(LENGTH, LENGTH, groups=2, dtype=torch.bfloat16)
    wide = [t.detach().float().requires_grad_() for t in half]
    found, expected = [], []
    for grads, heads in ((found, half), (expected, wide)):
        set_step(1)
        grads += gradients(context_of(types, *heads, layer=layer), heads)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one.float() - other).norm() < (0.15 if table else 0.1) * other.norm()


@pytest.mark.parametrize("table", ["", RANDOM], ids=["plain", "transformed"])
def test_each_operand_is_recorded_once_a_step(operands, options, table):
    options(table)
    tensors = operands(LENGTH, LENGTH, groups=2)
    context = context_of(all_of("mxfp8"), *tensors)
    dumped(lambda: gradients(context, tensors))
    RECORDER.end_step()
    entries = {(e.site, e.operand): e for e in RECORDER.entries()}
    assert {*entries} == {
        (site, operand)
        for site in ATTENTION_BACKWARD
        for operand in (SITES[site].lhs, SITES[site].rhs)
    }
    assert {(e.calls, e.measured) for e in entries.values()} == {(1, 1)}
    assert all(25 < e.sqnr_db < 45 for e in entries.values())


def test_an_excluded_layer_keeps_the_arithmetic_of_the_forward_pass(operands, options):
    tensors = operands(LENGTH, LENGTH)
    plain = gradients(context_of({"pv": "mxfp8"}, *tensors), tensors)
    options('[layers]\nexclude = ["dv:*", "dq:*"]\n')
    types = {"pv": "mxfp8", "dv": "mxfp4", "dq": "mxfp4"}
    for one, other in zip(gradients(context_of(types, *tensors), tensors), plain, strict=True):
        assert torch.equal(one, other)
    kinds = {e.quant_type for e in RECORDER.entries() if e.site in ("dv", "dq")}
    assert kinds == {"excluded"}


def test_no_tensor_grows_with_the_square_of_the_sequence(operands, monkeypatch):
    monkeypatch.setitem(chunks.BUDGET, "cpu", 4 * 32 * 32)
    seen = {}
    for length in (512, 1024):
        tensors = operands(length, length)
        with largest() as found:
            gradients(context_of(all_of("mxfp4"), *tensors), tensors)
        seen[length] = found.elements
    assert seen[1024] <= 2 * seen[512]


def peak_of(types, tensors):
    """The bytes that live at once in chunks, above the operands' own."""
    layer = layer_of(*tensors[:2])
    layer.scale_mask_softmax.input_in_float16 = tensors[0].dtype != torch.float32
    qk = gemm_operands("qk", types.get("qk", "none"), layer)
    sites = {s: gemm_operands(s, types.get(s, "none"), layer) for s in ATTENTION_BACKWARD}
    rest = (types.get("pv", "none"), (), None, qk, *tensors, None, BackwardOperands(**sites))
    with Peak() as seen:
        context = chunked_context(layer, *rest)
        gradients(context, tensors)
    return seen.bytes


@pytest.mark.parametrize("groups", [2, 8])
@pytest.mark.parametrize(
    ("quant_type", "dtype"),
    [("mxfp8", torch.float32), ("mxfp8", torch.bfloat16), ("nvfp4", torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("table", ["", RANDOM], ids=["plain", "transformed"])
def test_types_in_all_products_need_the_memory_of_none(
    operands, options, quant_type, dtype, groups, table
):
    options(table)
    tensors = operands(LENGTH, LENGTH, heads=8, groups=groups, dtype=dtype)
    types = all_of(quant_type) | {"qk": quant_type, "pv": quant_type}
    assert peak_of(types, tensors) <= 1.10 * peak_of({}, tensors)


def test_stochastic_rounding_keeps_rounded_copies(operands, options):
    options('[quantizer]\nrounding = "stochastic"\n')
    tensors = operands(LENGTH, LENGTH, heads=8, groups=2)
    types = all_of("mxfp8") | {"qk": "mxfp8", "pv": "mxfp8"}
    query, key = (t.nbytes for t in tensors[:2])
    # Queries of two products, gradients of two, keys of two, values; and a chunk reads all keys.
    assert peak_of(types, tensors) <= peak_of({}, tensors) + 4 * query + 4 * key


def a_mask(length):
    """Hides the key before each query, which no causal mask does."""
    causal = torch.ones(length, length, dtype=torch.bool).triu(1)
    return (causal | torch.ones_like(causal).tril(-1).triu(-1))[None, None]


def refused(**changes):
    layer = Layer(changes.pop("backend", "auto"), changes.pop("dropout", 0.0))
    for name, value in changes.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(
    ("layer", "mask", "packed", "why"),
    [
        (refused(backend="flash"), None, None, "backend is flash"),
        (refused(backend="unfused"), None, None, "backend is unfused"),
        (refused(dropout=0.1), None, None, "attention-dropout"),
        (refused(softmax_offset=torch.zeros(4)), None, None, "offset"),
        (refused(mqo_part=(0, 2)), None, None, "context-parallel-size"),
        (refused(), a_mask(40), None, "mask"),
        (refused(), None, SimpleNamespace(mqo_starts=(0, 7)), "packed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_chunks_is_refused_by_name(operands, layer, mask, packed, why):
    tensors = operands(40, 40)
    with pytest.raises(FusedAttentionError, match=rf"\(dv, dk\): .*{why}"):
        context_of({"dv": "mxfp8", "dk": "mxfp4"}, *tensors, packed, mask, layer)


def test_the_quantizers_are_in_the_order_of_the_sites():
    untyped = BackwardOperands.untyped()
    assert tuple(vars(untyped)) == ATTENTION_BACKWARD
    assert untyped.typed == []
    typed = replace(untyped, dp=gemm_operands("dp", "mxfp8", None))
    assert typed.typed == ["dp"]
