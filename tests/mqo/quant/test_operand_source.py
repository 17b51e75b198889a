"""source = "fprop": operands of backward that have the values of the forward pass."""

import pytest
import torch
from mqo.quant.backend import fake_quantize
from mqo.quant.config import current, parse
from mqo.quant.gemms import gemm_operands, operands_of
from mqo.quant.hadamard import transform
from mqo.quant.labels import LABEL
from mqo.quant.micro_batches import resume
from mqo.quant.plugin_decorators import quantizer
from mqo.quant.progress import set_step
from mqo.quant.quantization import PROCESS
from mqo.quant.record import RECORDER
from mqo.quant.spec import Hadamard
from mqo.quant.table import entries

from .cached_weights import cached_bytes
from .tensors import normal, wide_dtypes

LAYER = "decoder.layers.0.mlp.linear_fc1"
SOURCE = (
    '"dgrad.weight" = { source = "fprop", quant_type = "none" }\n'
    '"wgrad.x" = { source = "fprop", quant_type = "none" }\n'
)
GRADIENTS = '"dgrad.grad" = { quant_type = "mxfp8" }\n"wgrad.grad" = { quant_type = "mxfp8" }\n'
KINDS = ("mxfp8", "nvfp4", "hifp8", "fp8_tensor_e4m3", "mine")


def asked(fprop="mxfp8", backward="mixed"):
    return f'[asked]\nfprop = "{fprop}"\ndgrad = "{backward}"\nwgrad = "{backward}"\n'


def weight_and_x(dtype=torch.float32):
    weight = torch.nn.Parameter(normal(48, 72, seed=1, dtype=dtype))
    setattr(weight, LABEL, LAYER)
    return weight, normal(5, 4, 72, dtype=dtype)


class Saved:
    """A context of an autograd.Function."""


def passes(weight, x):
    """The operands of fprop, and those that dgrad and wgrad get in its backward pass."""
    kinds, ctx = current().asked, Saved()
    fprop = gemm_operands("fprop", kinds["fprop"], weight)
    fprop.save(ctx, x, weight, x)
    forward = fprop.lhs(x), fprop.rhs(weight)
    resume(ctx)
    dgrad, wgrad = (gemm_operands(site, kinds[site], weight) for site in ("dgrad", "wgrad"))
    return forward, (wgrad.rhs(x.reshape(-1, x.shape[-1])), dgrad.rhs(weight))


@pytest.fixture
def mine():
    """A custom quantizer that draws random numbers, and has an alpha."""

    @quantizer("mine", block=16, stochastic=True, needs_amax=True)
    def quantize(x, context):
        alpha = context.amax / 64
        return (x / alpha + context.rand()).floor(), alpha


@wide_dtypes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", ["", "rounding = 'stochastic'", "cache_weights = true"])
def test_the_operands_are_those_of_the_forward_pass(options, mine, kind, dtype, option):
    options(f"{asked(kind)}[quantizer]\n{option}\n[operands]\n{SOURCE}{GRADIENTS}")
    set_step(3)
    weight, x = weight_and_x(dtype)
    for _ in range(2):  # micro-batches, which draw other numbers
        (of_x, of_weight), (source_x, source_weight) = passes(weight, x)
        assert source_x.equal(of_x.reshape(-1, 72)) and not source_x.equal(x.reshape(-1, 72))
        assert source_weight.equal(of_weight)


@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_a_type_of_its_own_rounds_the_values_again(options, kind):
    rows = '"dgrad.weight" = { source = "fprop" }\n"wgrad.x" = { source = "fprop" }\n'
    options(f"{asked(kind, 'mxfp4')}[quantizer]\ncache_weights = true\n[operands]\n{rows}")
    weight, x = weight_and_x()
    for _ in range(2):
        (of_x, of_weight), (source_x, source_weight) = passes(weight, x)
        assert source_x.equal(fake_quantize(of_x.reshape(-1, 72), "mxfp4", axis=0))
        assert source_weight.equal(fake_quantize(of_weight, "mxfp4", axis=0))
        assert not source_weight.equal(fake_quantize(weight.detach(), "mxfp4", axis=0))
        assert of_weight.equal(fake_quantize(weight.detach(), kind))  # the cached one


@pytest.mark.parametrize("signs", ["fixed", "random", "none"])
def test_the_values_are_transformed_back(options, signs):
    row = f"{{ hadamard = 64, signs = '{signs}' }}"
    options(f'{asked()}[operands]\n{SOURCE}{GRADIENTS}"fprop.x" = {row}\n"fprop.weight" = {row}\n')
    weight, x = weight_and_x()  # 72 is no multiple of 64
    (of_x, of_weight), (source_x, source_weight) = passes(weight, x)
    assert of_x.shape[-1] == 128 and source_x.shape == (20, 72)
    seed = None
    if signs == "random":
        seed = operands_of("fprop", "mxfp8", weight)._sign_seed(Hadamard(64, signs))
    for source, rounded in ((source_x, of_x), (source_weight, of_weight)):
        again = transform(source, Hadamard(64, signs), seed=seed)
        # The padding has values in the other basis, which end with it.
        wide = rounded.reshape(-1, 128)
        torch.testing.assert_close(again[:, :64], wide[:, :64], rtol=1e-5, atol=1e-5)
        assert again[:, 64:].norm() <= wide[:, 64:].norm()


def test_alpha_multiplies_the_product(options):
    options(f"{asked('nvfp4')}[operands]\n{SOURCE}{GRADIENTS}")
    weight, _ = weight_and_x(torch.bfloat16)
    grad = normal(6, 48, seed=2, dtype=torch.bfloat16)
    operands = gemm_operands("dgrad", "mixed", weight)
    multiply = operands.product(torch.matmul)
    left, right = operands.lhs(grad), operands.rhs(weight)
    value = fake_quantize(weight.detach().float(), "nvfp4")
    exact = (left.double() @ value.double()).bfloat16()
    assert multiply(left, right).equal(exact)
    assert not (left @ value.bfloat16()).equal(exact)


def test_a_packed_input_is_its_source(options):
    options(
        f"{asked('nvfp4')}[quantizer]\nsave_activations = 'packed'\n[operands]\n{SOURCE}{GRADIENTS}"
    )
    weight, x = weight_and_x()
    unpacked = fake_quantize(x, "nvfp4").reshape(-1, 72)
    assert gemm_operands("wgrad", "mixed", weight).rhs(unpacked) is not None
    assert gemm_operands("wgrad", "mixed", weight).rhs(unpacked).equal(unpacked)
    assert {record.quant_type for record in RECORDER.entries()} == {"nvfp4"}


def test_the_records_have_the_type_of_the_forward_pass_and_its_noise(options):
    options(f"{asked('nvfp4')}[operands]\n{SOURCE}{GRADIENTS}")
    weight, x = weight_and_x()
    PROCESS.begin_step(1)
    passes(weight, x)
    rows = {(m.site, m.operand): m for m in RECORDER.end_step()}
    for site, operand in (("dgrad", "weight"), ("wgrad", "x")):
        assert rows[site, operand].noise == rows["fprop", operand].noise
        assert rows[site, operand].quant_type == "nvfp4"
        assert current().operand_type(site, operand, LAYER, "mixed") == "nvfp4"


def test_a_second_rounding_is_measured_from_what_it_rounds_and_the_first_not_again(options):
    options(f"{asked('nvfp4', 'mxfp8')}[operands]\n" + SOURCE.replace(', quant_type = "none"', ""))
    weight, x = weight_and_x()
    PROCESS.begin_step(1)
    (_, of_weight), (_, twice) = passes(weight, x)
    rows = {(m.site, m.operand): m for m in RECORDER.end_step()}
    noise = (twice.double() - of_weight.double()).square().sum()
    assert rows["dgrad", "weight"].noise == pytest.approx(float(noise), rel=1e-6)
    assert {r.calls for r in RECORDER.entries()} == {1}


def test_no_weight_is_cached_twice(options):
    options(f"{asked()}[quantizer]\ncache_weights = true\n[operands]\n{SOURCE}{GRADIENTS}")
    before, (weight, x) = cached_bytes(), weight_and_x()
    passes(weight, x)
    assert cached_bytes() == before + weight.nbytes


@pytest.mark.parametrize(
    "rest",
    [
        f"[layers]\nexclude = ['fprop:{LAYER}']\n",
        f"[[rules]]\nlayers = 'fprop:{LAYER}'\nquant_type = 'none'\n",
        "[schedule]\nfprop = 'mxfp8 until 2, then bf16'\n"
        "dgrad = 'mixed until 2, then bf16'\nwgrad = 'mixed until 2, then bf16'\n",
    ],
)
def test_where_the_forward_pass_is_not_quantized_the_operand_is_not(options, rest):
    options(f"{asked()}{rest}[operands]\n{SOURCE}{GRADIENTS}")
    set_step(5)
    weight, x = weight_and_x()
    (of_x, _), (source_x, source_weight) = passes(weight, x)
    assert of_x is x and source_x.equal(x.reshape(-1, 72)) and source_weight.equal(weight)
    types = {record.operand: record.quant_type for record in RECORDER.entries()}
    assert types.get("weight", "excluded") == types.get("x", "excluded") == "excluded"


def test_a_rule_gives_the_forward_pass_of_a_layer_another_type(options):
    options(
        f"{asked()}[[rules]]\nlayers = 'fprop:{LAYER}'\nquant_type = 'nvfp4'\n"
        f"[operands]\n{SOURCE}{GRADIENTS}"
    )
    weight, x = weight_and_x()
    assert passes(weight, x)[1][1].equal(fake_quantize(weight.detach(), "nvfp4"))
    assert current().operand_type("dgrad", "weight", LAYER, "mixed") == "nvfp4"
    assert current().operand_type("dgrad", "weight", "other", "mixed") == "mxfp8"


def test_the_table_says_where_an_operand_comes_from():
    words = {
        (entry.site, entry.operand): entry.choices
        for entry in entries(parse(f"{asked()}[operands]\n{SOURCE}{GRADIENTS}"))
    }
    assert words["dgrad", "weight"] == "none of fprop"
    assert words["wgrad", "grad"].startswith("mxfp8 ")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (f'{asked()}[operands]\n"fprop.x" = {{ source = "fprop" }}', "fprop.x has a source"),
        (f'{asked()}[operands]\n"dgrad.grad" = {{ source = "fprop" }}', "dgrad.grad has a source"),
        (f'{asked()}[operands]\n"qk.key" = {{ source = "fprop" }}', "qk.key has a source"),
        (f'{asked()}[operands]\n"wgrad.x" = {{ source = "dgrad" }}', "unknown source 'dgrad'"),
        (f"{asked('none')}[operands]\n{SOURCE}", "types other than 'none' for fprop"),
        (f"{asked(backward='none')}[operands]\n{SOURCE}", "for fprop and dgrad"),
        (
            f"{asked()}[schedule]\nfprop = 'mxfp8 until 5, then bf16'\n[operands]\n{SOURCE}",
            "the schedules of fprop and dgrad differ",
        ),
        (
            f"{asked()}[schedule]\nfprop = 'mxfp8 until 5, then mxfp4'\n"
            f"dgrad = 'mixed until 5, then mixed'\n[operands]\n{SOURCE}",
            "the schedules of fprop and dgrad differ",
        ),
    ],
)
def test_a_source_without_effect_is_refused(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse(text)
