"""check_quantizer: sound quantizers pass, and each check finds a quantizer with its fault."""

import runpy

import pytest
import torch
from mqo.project import Project
from mqo.quant.plugin_calls import QuantizerError, quantizer
from mqo.quant.plugin_check import _CHECKS, check_quantizer
from mqo.quant.plugins import PLUGINS

ROOT = Project.here().root


@pytest.fixture(autouse=True)
def no_plugin_left():
    yield
    PLUGINS.clear()


def faults_of(name):
    return {f.check for f in check_quantizer(name).findings if f.fault}


def test_four_over_six_passes_and_has_a_table():
    runpy.run_path(str(ROOT / "docs/quantizers/four_over_six.py"))
    report = check_quantizer("four_over_six")
    assert report.passed
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    skipped = [finding.check for finding in report.findings if finding.fault is None]
    assert skipped == ["stochastic rounding is unbiased"]
    errors = report.comparisons["N(0, 1)"].errors
    of_normal = {error.spec.quant_type: error.measurement.sqnr_db for error in errors}
    assert of_normal["four_over_six"] > of_normal["nvfp4"] + 0.5
    assert report.ms_per_mb > 0


def test_stochastic_rounding_passes():
    @quantizer("integers", stochastic=True)
    def quantize(x, context):
        return (4 * x + context.rand()).floor() / 4

    assert check_quantizer("integers").passed


def shifted(x, context):
    return x + 1


def overflowing(x, context):
    return x * 1e20 / 1e20


def noisy(x, context):
    return x + torch.rand(x.shape)


def of_memory(x, context):
    return x.as_strided(x.shape, (x.shape[1], 1)).clone()


def halved(x, context):
    return x / 2


def biased(x, context):
    return (4 * x + context.rand() / 2).floor() / 4


def toward_zero(x, context):
    return x.sign() * (4 * x.abs() + 0.8 * context.rand()).floor() / 4


def minus_other_rows(x, context):
    return x - x.mean(0)


def minus_the_row(x, context):
    return x - x.mean(1, keepdim=True)


CASES = [
    (shifted, {}, "zeros stay zero"),
    (overflowing, {}, "finite values stay finite, from 1e-40 to 1e30"),
    (noisy, {}, "equal calls return equal values"),
    (of_memory, {}, "strides have no effect"),
    (halved, {}, "a second rounding to nearest changes nothing"),
    (biased, {"stochastic": True}, "stochastic rounding is unbiased"),
    (toward_zero, {"stochastic": True}, "stochastic rounding is unbiased"),
    (minus_other_rows, {"independent_rows": True}, "rows are independent"),
    (minus_the_row, {"block": 16}, "blocks are independent"),
]
ENDED_BY_ERRORS = {"shapes and dtypes stay", "NaN and Inf raise no error"}


def test_every_check_has_a_case():
    assert {check for *_, check in CASES} | ENDED_BY_ERRORS == set(_CHECKS)


@pytest.mark.parametrize(("function", "declared", "check"), CASES)
def test_each_check_finds_its_fault(function, declared, check):
    quantizer("wrong", **declared)(function)
    assert check in faults_of("wrong")
    assert "ok" not in str(next(f for f in check_quantizer("wrong").findings if f.check == check))


def test_an_error_and_a_wrong_shape_end_the_check():
    @quantizer("finite_only")
    def quantize(x, context):
        assert x.isfinite().all(), "not finite"
        return x

    with pytest.raises(QuantizerError, match="AssertionError: not finite"):
        check_quantizer("finite_only")
    quantizer("narrow")(lambda x, context: x[:, :1])
    with pytest.raises(QuantizerError, match="valid: a tensor"):
        check_quantizer("narrow")


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="'mxfp4'"):
        check_quantizer("mxfp4")
