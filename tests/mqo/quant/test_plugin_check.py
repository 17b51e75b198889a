"""check_quantizer: sound quantizers pass, and each check finds a quantizer with its fault."""

import re
import runpy

import pytest
import torch
from mqo.project import Project
from mqo.quant.plugin_check import _CHECKS, check_file, check_quantizer
from mqo.quant.plugin_context import QuantizerError
from mqo.quant.plugin_decorators import end_step, estimator, quantizer
from mqo.quant.plugin_file import load_quantizers
from mqo.quant.plugin_source import declared
from mqo.quant.plugins import PLUGINS

ROOT = Project.here().root


def faults_of(name):
    return {f.check for f in check_quantizer(name).findings if f.fault}


def test_four_over_six_passes_and_has_a_table():
    runpy.run_path(str(ROOT / "tools/mqo/quant/recipes/four_over_six.py"))
    report = check_quantizer("four_over_six")
    assert report.passed
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    skipped = [finding.check for finding in report.findings if finding.fault is None]
    assert skipped == [
        "stochastic rounding is unbiased",
        "the next state has the declared names and shapes",
        "gradients of the estimator are finite",
    ]
    errors = report.comparisons["N(0, 1)"].errors
    of_normal = {error.spec.quant_type: error.measurement.sqnr_db for error in errors}
    assert of_normal["four_over_six"] > of_normal["nvfp4"] + 0.5
    assert report.ms_per_mb > 0


EXAMPLES = sorted((ROOT / "tools/mqo/quant/recipes").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_each_example_passes_and_is_declared_without_running_it(path):
    load_quantizers(path)
    assert path.stem in PLUGINS
    assert declared(path) == PLUGINS
    assert not set().union(*map(faults_of, PLUGINS))


def test_only_sizes_that_a_quantizer_accepts_are_tried():
    @quantizer("integers", stochastic=True, block=8, multiple=24, estimator=True)
    def quantize(x, context):
        assert x.shape[1] % 24 == 0
        return (4 * x + context.rand()).floor() / 4

    estimator("integers")(lambda grad, x, context: grad)
    assert check_quantizer("integers").passed


def test_a_quantizer_with_a_state_and_an_estimator_passes():
    with_state()
    with_estimator(lambda grad, x, context: grad * (x.abs() < context.options["most"]))
    for name in ("held", "clipped"):
        report = check_quantizer(name)
        assert report.passed
        assert max(map(len, str(report).splitlines())) <= 80


def with_state(update=lambda state, notes, step, options: notes):
    @quantizer("held", state={"amax": 1.0})
    def quantize(x, context):
        context.note("amax", x.abs().amax() if x.numel() else 0.0)
        return x.clamp(-2, 2)

    end_step("held")(update)


def with_estimator(estimate):
    quantizer("clipped", block=8, square=True, options={"most": 2.0}, estimator=True)(
        lambda x, context: x.clamp(-2, 2)
    )
    estimator("clipped")(estimate)


@pytest.mark.parametrize(
    ("update", "fault"),
    [
        (lambda state, notes, step, options: {}, "not valid"),
        (lambda state, notes, step, options: {"amax": state["amax"].double()}, "not valid"),
        (lambda state, notes, step, options: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_faulty_next_state_is_a_fault(update, fault):
    with_state(update)
    (finding,) = (f for f in check_quantizer("held").findings if f.fault)
    assert finding.check == "the next state has the declared names and shapes"
    assert fault in finding.fault


def test_a_gradient_that_is_not_finite_is_a_fault():
    with_estimator(lambda grad, x, context: grad / (x * 0))
    assert faults_of("clipped") == {"gradients of the estimator are finite"}
    with_estimator(lambda grad, x, context: grad[:, 0])
    with pytest.raises(QuantizerError, match="estimator of clipped returned no tensor"):
        check_quantizer("clipped")


def unchanged(x, context):
    return x


def shifted(x, context):
    return x + 1


def overflowing(x, context):
    return x * 1e20 / 1e20


def noisy(x, context):
    return x + torch.rand(x.shape)


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
    (unchanged, {}, "normal numbers are rounded"),
    (shifted, {}, "zeros stay zero"),
    (overflowing, {}, "finite values stay finite, from 1e-40 to 1e30"),
    (noisy, {}, "equal calls return equal values"),
    (halved, {}, "a second rounding to nearest changes nothing"),
    (biased, {"stochastic": True}, "stochastic rounding is unbiased"),
    (toward_zero, {"stochastic": True}, "stochastic rounding is unbiased"),
    (minus_other_rows, {"independent_rows": True}, "rows are independent"),
    (minus_the_row, {"block": 16}, "blocks are independent"),
    (minus_other_rows, {"independent_rows": True, "stochastic": True}, "rows are independent"),
    (minus_the_row, {"block": 16, "stochastic": True}, "blocks are independent"),
]
ENDED_BY_ERRORS = {"shapes and dtypes stay", "NaN and Inf raise no error"}
OWN_TESTS = {
    "the next state has the declared names and shapes",
    "gradients of the estimator are finite",
}


def test_every_check_has_a_case():
    assert {check for *_, check in CASES} | ENDED_BY_ERRORS | OWN_TESTS == set(_CHECKS)


@pytest.mark.parametrize(("function", "declared", "check"), CASES)
def test_each_check_finds_its_fault(function, declared, check):
    quantizer("wrong", **declared)(function)
    assert check in faults_of("wrong")
    assert "ok" not in str(next(f for f in check_quantizer("wrong").findings if f.check == check))


def test_a_fault_shows_the_value_and_is_repeated_below_the_table():
    quantizer("wrong")(lambda x, context: x.round() / x.abs().amax())
    lines = str(check_quantizer("wrong")).splitlines()
    assert any(re.fullmatch("zeros stay zero +nan with row tiles", line) for line in lines)
    assert "failed: zeros stay zero" in lines[-2:]


def test_a_quantizer_of_one_operand_rounds():
    @quantizer("weights")
    def quantize(x, context):
        return x.round() if context.operand == "weight" else x

    assert check_quantizer("weights").passed


def test_scales_without_one_of_the_tensor_underflow_in_the_table():
    @quantizer("narrow", block=16)
    def quantize(x, context):
        amax = x.view(-1, 16).abs().amax(1, keepdim=True)
        scale = (amax / 3).to(torch.float8_e4m3fn).float()
        return torch.where(scale > 0, (x.view(-1, 16) / scale).round() * scale, 0.0).view(x.shape)

    comparisons = check_quantizer("narrow").comparisons
    first = {data: found.errors[0].measurement.sqnr_db for data, found in comparisons.items()}
    assert first["N(0, 1)"] > 10 and first["N(0, 1)/1e5"] == 0


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


# -- the text of a file ----------------------------------------------------------------------------

HEAD = "from mqo.quant import quantizer\n"
BODY = "def mine(x, context):\n    return x.round()\n"
FILES = {
    "a block that is computed": (f"@quantizer('mine', block=2 * 8)\n{BODY}", "not a literal"),
    "a name that is computed": (f"@quantizer('mi' + 'ne')\n{BODY}", "not a literal"),
    "another call": (f"@quantizer('mine')\n{BODY}quantizer('mine', block=8)(mine)\n", "block"),
    "a call": (f"@quantizer('mine')\n{BODY}quantizer('more')(mine)\n", r"no @quantizer\('more'\)"),
    "a branch": (
        f"if True:\n    @quantizer('mine')\n    {BODY.replace('    return', '        return')}",
        "no function with @quantizer",
    ),
    "an import that has no copy": (
        f"from .lib import f\n@quantizer('mine')\n{BODY}",
        r"\.lib in line 2, which is not in Python|own\.lib in line 2, which is not in Python",
    ),
}


@pytest.fixture
def written(tmp_path):
    """A function that writes a file; its package has a module that is not in Python."""

    def write(text):
        folder = tmp_path / "own"
        folder.mkdir()
        (folder / "__init__.py").write_text(
            "import sys, types\nsys.modules['own.lib'] = types.SimpleNamespace(f=1)\n"
        )
        (folder / "mine.py").write_text(HEAD + text)
        return folder / "mine.py"

    return write


@pytest.mark.parametrize(("text", "fault"), FILES.values(), ids=FILES)
def test_a_file_that_a_run_would_read_otherwise_does_not_pass(written, text, fault):
    reports = check_file(written(text))
    findings = {report.name: report.findings[0] for report in reports}
    assert {finding.check for finding in findings.values()} == {"a run reads what it declares"}
    faults = [finding.fault for finding in findings.values() if finding.fault]
    assert len(faults) == 1
    assert re.search(rf"^a run would refuse the file: .*({fault})", faults[0])
    assert not all(report.passed for report in reports)


def test_a_file_with_literals_passes(written):
    (report,) = check_file(written(f"@quantizer('mine', options={{'n': 1}})\n{BODY}"))
    assert report.passed and report.findings[0].fault == ""


def test_a_quantizer_that_the_text_alone_has_is_refused(written):
    fake = "real = quantizer\nquantizer = lambda name: lambda function: function\n"
    path = written(f"{fake}@quantizer('mine')\n{BODY}real('other')(mine)\n")
    with pytest.raises(QuantizerError, match="does not register mine"):
        check_file(path)
