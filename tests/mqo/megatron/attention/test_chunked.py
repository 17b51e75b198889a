"""Chunked attention against upstream's steps written out, with the same quantizers."""

import pytest
import torch
from mqo.megatron.attention import chunks
from mqo.megatron.attention.backward import BackwardOperands, Heads
from mqo.megatron.attention.choice import without_scores
from mqo.megatron.attention.chunked import Scores, Settings, chunked_attention
from mqo.megatron.attention.chunks import HIDDEN, Span, Visible
from mqo.megatron.attention.context import chunk_mask, chunk_starts
from mqo.megatron.attention.paths import chunked_context
from mqo.quant.backend import fake_quantize
from mqo.quant.formats import FORMATS
from mqo.quant.gemms import gemm_operands
from mqo.quant.parts import OperandParts
from mqo.quant.products import Alphas
from mqo.quant.progress import set_step
from mqo.quant.quantization import PROCESS
from mqo.quant.record import RECORDER
from mqo.quant.spec import QuantSpec

from .conftest import Layer, largest
from .typed import rows

SCALE = Layer().softmax_scale
SHAPES = {
    "plain": {},
    "grouped": {"groups": 2},
    "one group": {"groups": 1},
    "MLA's heads": {"width": 24, "value_width": 16},
    "odd sizes": {"width": 12, "value_width": 7, "groups": 2},
}
LENGTH = 150


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks of queries, and of matrices."""
    monkeypatch.setitem(chunks.BUDGET, "cpu", 2 * 32 * LENGTH)
    monkeypatch.setattr(chunks, "_MOST_QUERIES", 32)


def unfused(layer, types, query, key, value, mask=None, kept=None):
    """Upstream's steps, on operands that are quantized where its patched source has them."""
    sq, b, heads, _ = query.shape
    sk, repeats = key.size(0), heads // key.size(2)
    qk = gemm_operands("qk", types[0], layer)
    key, value = (t.repeat_interleave(repeats, 2).flatten(1, 2) for t in (key, value))
    query = query.flatten(1, 2)
    scores = qk.product(torch.baddbmm)(
        query.new_empty(b * heads, sq, sk),
        qk.lhs(query).transpose(0, 1),
        qk.rhs(key).transpose(0, 1).transpose(1, 2),
        beta=0.0,
        alpha=layer.softmax_scale,
    ).view(b, heads, sq, sk)
    softmax = layer.scale_mask_softmax
    if softmax.input_in_float16 and softmax.softmax_in_fp32:
        scores = scores.float()
    if softmax.scale is not None:
        scores = scores * softmax.scale
    if mask is None and sq > 1:
        mask = torch.ones(sq, sk, dtype=torch.bool).triu(sk - sq + 1)
    hidden = scores if mask is None else scores.masked_fill(mask, HIDDEN)
    probs = hidden.softmax(-1).to(query.dtype).view(b * heads, sq, sk)
    pv = gemm_operands("pv", types[1], layer)
    multiply = pv.product(torch.bmm)
    rounded = pv.lhs(probs)
    if kept is not None:
        kept["codes"] = rounded.detach()
    context = multiply(rounded, pv.rhs(value).transpose(0, 1)).view(b, heads, sq, -1)
    return context.permute(2, 0, 1, 3).flatten(2)


def chunked(layer, types, query, key, value, mask=None, starts=()):
    qk = gemm_operands("qk", types[0], layer)
    return chunked_context(layer, types[1], starts, mask, qk, query, key, value, None)


def gradients(context, tensors):
    weights = torch.randn(context.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad((context.float() * weights).sum(), tensors)


def error(actual, expected):
    """The deviation's norm, relative to that of what is expected."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_alike(found, expected, tensors, of_context=1e-6, of_gradients=1e-6):
    assert error(found, expected) < of_context
    pairs = zip(gradients(found, tensors), gradients(expected, tensors), strict=True)
    assert all(error(one, other) < of_gradients for one, other in pairs)


class Given(OperandParts):
    """Gives codes that are known; and counts how many of its own would be others."""

    def quantize(self, part, matrix, row, out):
        count, rows, size = part.shape
        codes = KNOWN["codes"][matrix : matrix + count, row : row + rows, :size]
        KNOWN["moved"] += (super().quantize(part, matrix, row, out) != codes).sum().item()
        return out.copy_(codes)


KNOWN = {}


def assert_as_unfused(tensors, quant_type, tolerance=1e-6, moved=0):
    """With the same codes: context and gradients; and how many codes are others, over 2 passes."""
    layer, types = Layer(), ("none", quant_type)
    expected = unfused(layer, types, *tensors, kept=KNOWN)
    right = gradients(expected, tensors)
    query, key, value = tensors
    sq, b, heads, _ = query.shape
    pv = gemm_operands("pv", quant_type, layer)
    alphas = Alphas(), pv.separate_alphas()
    parts = pv.lhs_parts((b * heads, sq, key.size(0)), 1.0, query.device)
    KNOWN["moved"] = 0
    given = Given(PROCESS, parts.key, parts.spec, parts.shape, parts.seed, parts.amax, parts.alpha)
    visible = Visible((Span(0, sq, 0),))
    settings = Settings(Scores(SCALE), visible, given, *alphas, BackwardOperands.untyped())
    heads = Heads(query, key, pv.rhs(value))
    found = chunked_attention(heads, heads, settings)
    assert error(found, expected) < tolerance
    for one, other in zip(gradients(found, tensors), right, strict=True):
        assert error(one, other) < tolerance
    assert KNOWN["moved"] <= moved


# Every format, and every shape with a scale of blocks, of the tensor, of both and with none.
CASES = [(kind, "grouped") for kind in FORMATS]
CASES += [
    (kind, shape)
    for kind in ("mxfp8", "fp8_tensor_e4m3", "nvfp4", "hifp8")
    for shape in SHAPES.keys() - {"grouped"}
]
every_case = pytest.mark.parametrize(("quant_type", "shape"), sorted(CASES))


@every_case
def test_context_and_gradients_are_those_of_the_unfused_path(operands, shape, quant_type):
    assert_as_unfused(operands(LENGTH, LENGTH, **SHAPES[shape]), quant_type)


@pytest.mark.slow
def test_a_code_in_a_million_is_another(operands, monkeypatch):
    """Where a GEMM's last bit moves a probability over a rounding tie; of 2 x 8 x 1024^2 codes."""
    monkeypatch.setitem(chunks.BUDGET, "cpu", 2**20)
    tensors = operands(1024, 1024, groups=2, width=64)
    for quant_type in ("mxfp8", "mxfp4", "nvfp4"):
        assert_as_unfused(tensors, quant_type, moved=2 * 8 * 1024 * 1024 // 1_000_000)


def test_hifp8_may_have_a_scale_of_the_tensor(operands, options):
    options("[quantizer]\ntensor_scale = true\n")
    assert_as_unfused(operands(LENGTH, LENGTH, groups=2), "hifp8")


@pytest.mark.parametrize("quant_type", ["mxfp8", "nvfp4", "hif4"])
@pytest.mark.parametrize("in_fp32", [True, False])
def test_half_precision_rounds_where_upstream_does(operands, quant_type, in_fp32):
    layer, types = Layer(), (quant_type, quant_type)
    softmax = layer.scale_mask_softmax
    softmax.input_in_float16, softmax.softmax_in_fp32 = True, in_fp32
    tensors = operands(LENGTH, LENGTH, groups=2, dtype=torch.bfloat16)
    expected, found = (f(layer, types, *tensors) for f in (unfused, chunked))
    assert found.dtype == torch.bfloat16
    assert_alike(found, expected, tensors, 5e-3, 2e-2)


def test_the_softmax_may_scale_again(operands):
    layer = Layer()
    layer.scale_mask_softmax.scale = 3
    tensors = operands(LENGTH, LENGTH)
    expected, found = (f(layer, ("mxfp4", "mxfp4"), *tensors) for f in (unfused, chunked))
    assert_alike(found, expected, tensors)


@pytest.mark.parametrize("batches", [1, 2])
def test_a_mask_says_what_is_seen(operands, batches):
    """Documents that do not see one another, as --reset-attention-mask has it."""
    ends = torch.tensor([[40, 41, 100], [7, 80, 128]])[:batches]
    document = (torch.arange(LENGTH) >= ends[:, :, None]).sum(1)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    mask = ((document[:, :, None] != document[:, None]) | causal)[:, None]
    tensors = operands(LENGTH, LENGTH, groups=2)
    expected, found = (f(Layer(), ("mxfp4", "mxfp4"), *tensors, mask) for f in (unfused, chunked))
    assert_alike(found, expected, tensors)


def test_a_single_query_sees_every_key(operands):
    tensors = operands(1, LENGTH, groups=2)
    expected, found = (f(Layer(), ("mxfp8", "mxfp8"), *tensors) for f in (unfused, chunked))
    assert error(found, expected) < 1e-6


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(
    ("kind", "table"), [("nvfp4", ""), ("mxfp8", rows("hadamard = 128"))], ids=["", "transformed"]
)
def test_a_rank_of_the_context_has_its_rows(operands, options, rank, kind, table):
    options(table)
    length = 192
    query, key, value = operands(length, length, groups=2)
    layer, size = Layer(), length // 6
    layer.mqo_part = (rank, 3)
    starts = chunk_starts(2 * size, layer.mqo_part)
    mine = torch.cat([torch.arange(start, start + size) for start in starts])
    found = chunked(layer, ("none", kind), query[mine], key, value)
    expected = unfused(Layer(), ("none", kind), query, key, value)[mine]
    assert error(found, expected) < 1e-6
    mask = chunk_mask(2 * size, layer.mqo_part, query.device)
    by_mask = chunked(layer, ("none", kind), query[mine], key, value, mask)
    assert torch.equal(by_mask, found)


TRANSFORMED = rows('hadamard = 32, signs = "random"')


@pytest.mark.parametrize("shape", [{}, {"groups": 2}], ids=str)
@pytest.mark.parametrize("table", ["", TRANSFORMED], ids=["plain", "transformed"])
def test_stochastic_rounding_draws_by_the_elements_place(operands, options, shape, table):
    options(f'[quantizer]\nrounding = "stochastic"\nseed = 3\n{table}')
    tensors = operands(LENGTH, LENGTH, **shape)
    for step in (0, 1):
        set_step(step)
        layer = Layer()
        layer.num_attention_heads_per_partition = 4
        layer.num_query_groups_per_partition = tensors[1].size(2)
        expected = unfused(layer, ("mxfp4", "mxfp4"), *tensors)
        right = gradients(expected, tensors)
        set_step(step)
        found = chunked(layer, ("mxfp4", "mxfp4"), *tensors)
        assert error(found, expected) < 1e-6
        pairs = zip(gradients(found, tensors), right, strict=True)
        assert all(error(one, other) < 1e-6 for one, other in pairs)


@every_case
def test_transformed_operands_are_those_of_the_unfused_path(operands, options, shape, quant_type):
    options(TRANSFORMED)
    tensors, types = operands(LENGTH, LENGTH, **SHAPES[shape]), (quant_type, quant_type)
    expected = unfused(Layer(), types, *tensors)
    right = gradients(expected, tensors)
    set_step(0)
    found = chunked(Layer(), types, *tensors)
    # Numbers near a tie may round the other way.
    assert error(found, expected) < 1e-3
    for one, other in zip(gradients(found, tensors), right, strict=True):
        assert error(one, other) < 1e-3


@pytest.mark.parametrize("quant_type", ["mxfp4", "nvfp4", "fp8_tensor", "hifp8"])
@pytest.mark.parametrize("table", ["", TRANSFORMED], ids=["plain", "transformed"])
def test_what_is_recorded_is_what_the_unfused_path_records(operands, options, quant_type, table):
    options(f"[record]\nevery = 1\ndump = [1]\n{table}")
    tensors = operands(LENGTH, LENGTH, groups=2)
    seen = []
    for attend in (unfused, chunked):
        RECORDER.reset()
        set_step(0)
        PROCESS.begin_step(1)
        gradients(attend(Layer(), (quant_type, quant_type), *tensors), tensors)
        measured = {one.key: one for one in RECORDER.end_step() if one.site == "pv"}
        calls = {r.key: (r.calls, r.measured) for r in RECORDER.entries() if r.site == "pv"}
        seen.append((measured, calls, RECORDER.take_dump()))
    (measured, calls, dump), (found, found_calls, found_dump) = seen
    assert found_calls == calls
    assert found.keys() == measured.keys()
    for key, one in measured.items():
        repeats = 2 if key[2] == "value" else 1  # of grouped values, which are not repeated
        other = found[key]
        assert other.signal * repeats == pytest.approx(one.signal)
        assert other.noise * repeats == pytest.approx(one.noise)
        for name in ("elements", "nonzero", "underflowed", "saturated"):
            assert getattr(other, name) * repeats == getattr(one, name)
        blocks = repeats if one.quant_type in FORMATS and FORMATS[one.quant_type].block else 1
        assert {e: n * blocks for e, n in other.scales.items()} == one.scales
    assert error(found_dump["pv/unlabeled/probs"], dump["pv/unlabeled/probs"]) < 1e-6


def test_the_dump_of_a_step_is_of_its_first_call(operands, options):
    options("[record]\ndump = [1]\n")
    tensors = operands(64, 64)
    PROCESS.begin_step(1)
    chunked(Layer(), ("none", "mxfp8"), *tensors)
    first = RECORDER._dump["pv/unlabeled/probs"].clone()
    chunked(Layer(), ("none", "mxfp8"), *(2 * t for t in tensors))
    assert torch.equal(RECORDER.take_dump()["pv/unlabeled/probs"], first)


def test_a_nan_is_found_where_it_comes_from(operands, options):
    options("[run]\ncheck_nan = true\n")
    query, key, value = (t.detach() for t in operands(LENGTH, LENGTH))
    query[70] = torch.nan
    with pytest.raises(Exception, match=r"probs .*pv.*unlabeled"):
        chunked(Layer(), ("none", "mxfp8"), query, key, value)


@pytest.mark.parametrize("quant_type", FORMATS)
def test_a_nan_does_not_vanish(operands, quant_type):
    query, key, value = (t.detach() for t in operands(LENGTH, LENGTH, groups=2))
    query[70] = torch.nan
    found = chunked(Layer(), ("none", quant_type), query, key, value)
    assert found[70].isnan().all()
    assert found[:64].isfinite().all()


def test_no_tensor_grows_with_the_square_of_the_sequence(operands, monkeypatch):
    length = 1024
    monkeypatch.setitem(chunks.BUDGET, "cpu", 2**16)
    tensors = operands(length, length, groups=2)
    with largest() as seen:
        gradients(chunked(Layer(), ("mxfp8", "mxfp8"), *tensors), tensors)
    assert seen.elements == 2 * 4 * length * 16 < length * length


def test_gradients_flow_through_a_recomputed_layer(operands, options):
    options('[quantizer]\nrounding = "stochastic"\n')
    tensors, layer = operands(LENGTH, LENGTH), Layer()
    right = gradients(chunked(layer, ("none", "mxfp4"), *tensors), tensors)
    set_step(0)
    again = torch.utils.checkpoint.checkpoint(
        lambda *t: chunked(layer, ("none", "mxfp4"), *t), *tensors, use_reentrant=False
    )
    for one, other in zip(gradients(again, tensors), right, strict=True):
        assert torch.equal(one, other)


def test_an_operand_without_a_type_is_handed_on():
    parts = OperandParts(PROCESS, ("pv", "a", "probs"), QuantSpec("none"), (1, 2, 3))
    part = torch.ones(1, 2, 3)
    assert parts.quantize(part, 0, 0, torch.zeros_like(part)) is part
    parts.observe(part, part, 0, 0)
    assert RECORDER.entries() == []


# -- SageAttention's ingredients ------------------------------------------------------------------


class _Rounded(torch.autograd.Function):
    """Rounds; gradients pass straight through."""

    @staticmethod
    def forward(ctx, tensor, spec, axis, amax):
        return fake_quantize(tensor, spec, axis=axis, amax=amax)

    @staticmethod
    def backward(ctx, grad):
        return grad, None, None, None


@pytest.mark.parametrize("quant_type", ["mxfp8", "mxfp4", "fp8_tensor_e4m3", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_probabilities_may_be_divided_by_their_sum_after(operands, options, quant_type, dtype):
    options("[quantizer]\nunnormalized_probs = true\n")
    tensors = query, key, value = operands(LENGTH, LENGTH, dtype=dtype)
    found = chunked(Layer(), ("none", quant_type), *tensors)
    spec, one = QuantSpec(quant_type), torch.ones(())
    scores = SCALE * torch.einsum("qbhd,kbhd->bhqk", query.float(), key.float())
    scores = scores.to(dtype).float()
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    # The maximum cancels: its gradient is none.
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    rounded = _Rounded.apply(weights.to(dtype), spec, -1, one).float()
    values = _Rounded.apply(value, spec, 0, None).float()
    context = torch.einsum("bhqk,kbhd->qbhd", rounded, values)
    expected = context / weights.sum(-1).permute(2, 0, 1)[..., None]
    expected = expected.flatten(2)
    moved = 2e-5 if dtype == torch.float32 else 2e-2
    assert error(found, expected) < moved
    # What is summed and what is rounded are one thing in backward: P = exp(s - max) / sum.
    exact = weights / weights.sum(-1, keepdim=True)
    through = rounded / weights.sum(-1, keepdim=True).detach()
    straight = exact + (through - exact).detach()
    expected = torch.einsum("bhqk,kbhd->qbhd", straight, values).flatten(2)
    for one, other in zip(gradients(found, tensors), gradients(expected, tensors), strict=True):
        assert error(one, other) < moved


def test_a_path_that_cannot_says_so(operands, options):
    options("[quantizer]\nunnormalized_probs = true\n")
    tensors = operands(4, 4)
    with pytest.raises(ValueError, match="--unnormalized-probs"):
        unfused(Layer(), ("none", "mxfp8"), *tensors)
    unfused(Layer(), ("mxfp8", "none"), *tensors)


def test_a_query_that_sees_nothing_gives_no_gradient_to_what_it_does_not_see(operands):
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    mask[5] = True
    tensors = operands(LENGTH, LENGTH, groups=2)
    expected, found = (
        f(Layer(), ("none", "mxfp8"), *tensors, mask[None, None]) for f in (unfused, chunked)
    )
    assert_alike(found, expected, tensors)


def test_without_a_causal_mask_the_amax_is_still_known(operands, options):
    query, key, _ = operands(1, 4)
    types = {"qk": "none", "pv": "nvfp4"}
    assert without_scores(Layer(), types, query, key, None) is None
    options("[quantizer]\nunnormalized_probs = true\n")
    assert without_scores(Layer(), types, query, key, None)


@pytest.mark.parametrize("attend", [unfused, chunked])
def test_smooth_keys_are_rounded_without_their_mean(operands, options, attend):
    query, key, value = (t.detach() for t in operands(LENGTH, LENGTH, groups=2))
    key += 8 * torch.randn(key.shape[2:], generator=torch.Generator().manual_seed(2))
    exact = attend(Layer(), ("none", "none"), query, key, value)
    rough = attend(Layer(), ("mxfp4", "none"), query, key, value)
    options("[quantizer]\nsmooth_key = true\n")
    smooth = attend(Layer(), ("mxfp4", "none"), query, key, value)
    assert error(smooth, exact) < error(rough, exact) / 2
    # The mean alone changes nothing: a format that holds nearly everything shows it.
    fine = attend(Layer(), ("mxint8", "none"), query, key, value)
    assert error(fine, exact) < 0.05
    qk = gemm_operands("qk", "mxfp4", Layer())
    centered = key - key.mean(0, keepdim=True)
    assert torch.equal(qk.rhs(key), fake_quantize(centered, QuantSpec("mxfp4")))
    assert torch.equal(qk.lhs(query), fake_quantize(query, QuantSpec("mxfp4")))
