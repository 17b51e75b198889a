"""Rows of [operands] and [[rules]]: what each operand becomes, and what is refused."""

import re

import pytest
import torch
from mqo.megatron.layers import label_layers
from mqo.quant import config
from mqo.quant.backend import fake_quantize
from mqo.quant.config import current
from mqo.quant.formats import SITES
from mqo.quant.gemms import gemm_operands
from mqo.quant.hadamard import transform
from mqo.quant.progress import set_step
from mqo.quant.quantization import PROCESS
from mqo.quant.record import RECORDER
from mqo.quant.spec import Hadamard, QuantSpec
from torch.nn import Linear, Module, Parameter

from .cached_weights import cached_bytes
from .tensors import normal


class Model(Module):
    """Two layers, whose weights are called first.weight and second.weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Linear(64, 32, bias=False), Linear(64, 32, bias=False)
        label_layers(self)


def test_without_a_row_an_operand_is_as_the_run_says(options):
    options('[quantizer]\nscale_rule = "rceil"\n')
    found = current().operand_spec("fprop", "x", "a", "mxfp8")
    assert found.spec == QuantSpec("mxfp8", scale_rule="rceil")
    assert (found.hadamard, found.gain) == (None, 1.0)


def test_a_row_changes_its_operand_alone(options):
    options('[operands]\n"dgrad.grad" = { rounding = "stochastic", scale_rule = "ceil" }\n')
    plain = QuantSpec("mxfp4")
    for site in ("fprop", "dgrad", "wgrad"):
        for operand in (SITES[site].lhs, SITES[site].rhs):
            named = (site, operand) == ("dgrad", "grad")
            changed = QuantSpec("mxfp4", rounding="stochastic", scale_rule="ceil")
            found = current().operand_spec(site, operand, "a", "mxfp4").spec
            assert found == (changed if named else plain)


def test_operands_may_have_types_of_their_own_or_none(options):
    options(
        "[operands]\n"
        '"fprop.x" = { quant_type = "none" }\n"fprop.weight" = { quant_type = "nvfp4" }\n'
    )
    operands, x, w = gemm_operands("fprop", "mixed", None), normal(4, 64), normal(32, 64, seed=1)
    assert operands.lhs(x) is x
    assert operands.rhs(w).equal(fake_quantize(w, QuantSpec("nvfp4")))
    assert [(r.operand, r.quant_type) for r in RECORDER.entries()] == [("weight", "nvfp4")]


def test_a_family_has_a_type_for_gradients(options):
    types = {
        (s.name, op): current().operand_type(s.name, op, "a", "fp8_tensor")
        for s in SITES.values()
        for op in (s.lhs, s.rhs)
    }
    gradients = {place for place, kind in types.items() if kind == "fp8_tensor_e5m2"}
    assert gradients == {
        *(("dgrad", "grad"), ("wgrad", "grad"), ("dv", "grad"), ("dp", "grad")),
        *(("dq", "ds"), ("dk", "ds")),
    }
    assert set(types.values()) == {"fp8_tensor_e5m2", "fp8_tensor_e4m3"}


def test_a_mixed_site_needs_rows(options):
    with pytest.raises(ValueError, match=r"fprop is 'mixed'.* fprop\.x"):
        gemm_operands("fprop", "mixed", None).lhs(normal(4, 64))


def test_the_first_rule_that_matches_decides(options):
    options(
        '[[rules]]\nlayers = "wgrad:first"\nquant_type = "none"\n'
        '[[rules]]\nlayers = "linear:first"\nquant_type = "mxfp8"\n'
        '[[rules]]\nlayers = "*"\nquant_type = "fp8_tensor"\n'
    )
    model, x = Model(), normal(4, 64)
    first, second = model.first.weight, model.second.weight
    assert gemm_operands("wgrad", "mxfp4", first).lhs(x) is x
    assert gemm_operands("fprop", "mxfp4", first).lhs(x).equal(fake_quantize(x, QuantSpec("mxfp8")))
    g = gemm_operands("dgrad", "mxfp4", second).lhs(x)
    assert g.equal(fake_quantize(x, QuantSpec("fp8_tensor_e5m2")))
    assert current().is_excluded("wgrad", "first") and not current().is_excluded("fprop", "first")
    assert {(r.layer, r.site, r.quant_type) for r in RECORDER.entries()} == {
        ("first", "wgrad", "excluded"),
        ("first", "fprop", "mxfp8"),
        ("second", "dgrad", "fp8_tensor_e5m2"),
    }


def test_an_operands_own_type_is_that_of_the_source_alone(options):
    options(
        '[asked]\nwgrad = "mixed"\nfprop = "mxfp8"\n'
        '[schedule]\nwgrad = "mixed until 10, then mxfp8"\n'
        '[operands]\n"wgrad.grad" = { quant_type = "mxfp4" }\n'
        '"wgrad.x" = { quant_type = "mxfp4" }\n"fprop.x" = { quant_type = "mxfp8_e5m2" }\n'
        '[[rules]]\nlayers = "linear:ruled"\nquant_type = "mxfp8"\n'
    )
    assert current().operand_type("wgrad", "grad", "a", "mixed") == "mxfp4"
    assert current().operand_type("wgrad", "grad", "a", "mxfp8") == "mxfp8"
    assert current().operand_type("fprop", "x", "a", "mxfp8") == "mxfp8_e5m2"
    assert current().operand_type("fprop", "x", "ruled", "mxfp8") == "mxfp8"


def test_a_rule_of_other_sites_lengthens_no_block(options):
    options(
        '[asked]\nfprop = "mxfp8"\nqk = "mxfp8"\n'
        '[[rules]]\nlayers = "attention:*"\nquant_type = "fp8_block"\n'
    )
    assert config.current().blocks() == {"fprop": 32, "qk": 128}


def test_no_rule_switches_a_site_on(options):
    options('[[rules]]\nlayers = "*"\nquant_type = "mxfp8"\n')
    x = normal(4, 64)
    assert gemm_operands("fprop", "none", Model().first.weight).lhs(x) is x
    assert not RECORDER.entries()


TRANSFORMED = '"wgrad.grad" = { hadamard = 16 }\n"wgrad.x" = { hadamard = 16 }\n'


def test_both_operands_are_transformed_then_quantized(options):
    options(f"[operands]\n{TRANSFORMED}")
    operands = gemm_operands("wgrad", "nvfp4", None)
    for quantize, tensor in ((operands.lhs, normal(40, 32)), (operands.rhs, normal(40, 64))):
        turned = transform(tensor, Hadamard(16), axis=0)
        assert turned.shape[0] == 48
        assert quantize(tensor).equal(fake_quantize(turned, QuantSpec("nvfp4"), axis=0))


def test_random_signs_are_those_of_both_operands_and_of_one_step(options):
    kind = '{ quant_type = "none", hadamard = 32, signs = "random" }'
    options(f'[operands]\n"dgrad.grad" = {kind}\n"dgrad.weight" = {kind}\n')
    g, w = normal(8, 96).double().float(), normal(96, 64, seed=1)
    turned = []
    for step in (0, 1):
        set_step(step)
        operands = gemm_operands("dgrad", "mxfp4", None)
        turned.append(operands.lhs(g))
        product = operands.lhs(g).double() @ operands.rhs(w).double()
        torch.testing.assert_close(product, g.double() @ w.double(), atol=1e-4, rtol=0)
    assert not turned[0].equal(turned[1])
    assert not turned[0].equal(g)


def test_a_kept_weight_has_the_signs_of_the_step(options):
    """A step that the optimizer skips changes no weight, and draws other signs all the same."""
    kind = '{ hadamard = 64, signs = "random" }'
    options(
        f'[operands]\n"dgrad.grad" = {kind}\n"dgrad.weight" = {kind}\n'
        "[quantizer]\ncache_weights = true\n"
    )
    g, w = normal(8, 128), Parameter(normal(128, 64, seed=1))
    exact = g.double() @ w.detach().double()
    for step in range(3):
        set_step(step)
        operands = gemm_operands("dgrad", "mxfp8", w)
        product = operands.lhs(g).double() @ operands.rhs(w).double()
        assert (product - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("gain", [0.75, 1.0625, 2.0])
def test_a_gain_is_taken_before_rounding_and_given_back_after(options, gain):
    options(f'[operands]\n"dgrad.grad" = {{ gain = {gain} }}\n')
    x = normal(4, 64)
    expected = fake_quantize(gain * x, QuantSpec("mxfp4")) * (1 / gain)
    assert gemm_operands("dgrad", "mxfp4", None).lhs(x).equal(expected)
    assert gemm_operands("dgrad", "none", None).lhs(x) is x


def test_square_weights_are_quantized_once_for_both_gemms(options):
    rows = ", ".join(f'"{site}.weight" = {{ tile = "square" }}' for site in ("fprop", "dgrad"))
    options(f"operands = {{ {rows} }}\n[quantizer]\ncache_weights = true\n")
    weight = Parameter(normal(48, 64))
    fprop = gemm_operands("fprop", "nvfp4", weight).rhs(weight)
    dgrad = gemm_operands("dgrad", "nvfp4", weight).rhs(weight)
    assert fprop.data_ptr() == dgrad.data_ptr()
    assert fprop.equal(fake_quantize(weight, QuantSpec("nvfp4", tile="square"), axis=0))
    before = cached_bytes()
    gemm_operands("fprop", "hif4", weight).rhs(weight)  # which has no squares
    gemm_operands("dgrad", "hif4", weight).rhs(weight)
    assert cached_bytes() == before + 2 * weight.nbytes  # rows along one axis are not the other's


def test_a_transformed_operand_is_measured_as_it_is_rounded_and_dumped_as_it_was(options):
    options(f"[record]\ndump = [1]\n[operands]\n{TRANSFORMED}")
    x = normal(64, 32)
    PROCESS.begin_step(1)
    gemm_operands("wgrad", "mxint8", None).lhs(x)
    (measured,) = RECORDER.end_step()
    turned = transform(x, Hadamard(16), axis=0).double()
    q = fake_quantize(turned.float(), QuantSpec("mxint8"), axis=0).double()
    assert measured.noise == pytest.approx(float((turned - q).square().sum()), rel=1e-6)
    assert RECORDER.take_dump()["wgrad/unlabeled/grad"].equal(x)


def test_the_longest_block_counts_transforms_and_rules(options):
    options(
        '[asked]\nfprop = "nvfp4"\nwgrad = "nvfp4"\n'
        '[[rules]]\nlayers = "a"\nquant_type = "mxfp8"\n'
        '[operands]\n"wgrad.grad" = { hadamard = 64 }\n"wgrad.x" = { hadamard = 64 }\n'
    )
    assert config.current().blocks() == {"fprop": 32, "wgrad": 64}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("operands = 3", "operands = 3 should be a table"),
        ('[operands]\n"fprop.y" = {}', "unknown operand 'fprop.y'; valid: fprop.x"),
        (
            '[operands]\n"fprop.x" = { tiles = "row" }',
            "operands.fprop.x 'tiles'; valid: quant_type",
        ),
        ('[operands]\n"fprop.x" = { tile = "round" }', "unknown tile 'round'; valid: row, square"),
        ('[operands]\n"fprop.x" = { quant_type = "fp5" }', "unknown quant type 'fp5'"),
        ('[operands]\n"fprop.x" = { gain = 2.01 }', "gain 2.01; valid: 2^-10 to 2.0"),
        ('[operands]\n"fprop.x" = { gain = 1e-320 }', "gain 1e-320; valid: 2^-10"),
        ('[operands]\n"fprop.x" = { gain = true }', "gain True; valid: 2^-10"),
        ('[operands]\n"fprop.x" = { hadamard = 17 }', "unknown hadamard 17; valid: 16, 32"),
        (
            '[operands]\n"fprop.x" = { hadamard = 16 }',
            "operands of fprop have different transforms",
        ),
        ('[operands]\n"qk.key" = { gain = 0.5 }', "qk is not a site of linear layers"),
        ('[operands]\n"dk.ds" = { hadamard = 16 }', "operands of dk have different transforms"),
        ("rules = 3", "rules = 3 should be a list"),
        ('[[rules]]\nlayers = "a"', "either quant_type or recipe"),
        ('[[rules]]\nlayers = "mlp:a"\nquant_type = "none"', "unknown GEMM site or kind"),
        ('[[rules]]\nlayers = "a"\nquant_type = "fp5"', "unknown quant type 'fp5'"),
        ('[[rules]]\nlayers = "a"\nquant_type = "mixed"', "unknown quant type 'mixed'"),
        (
            '[quantizer]\nsave_activations = "packed"\n[operands]\n"fprop.x" = { gain = 0.5 }',
            "save_activations",
        ),
    ],
)
def test_a_faulty_row_is_named(options, text, complaint):
    path = options(text)
    with pytest.raises(ValueError, match=re.escape(complaint)) as fault:
        config.current()
    assert str(fault.value).startswith(f"{path}: ")
