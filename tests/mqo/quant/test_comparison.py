"""The error of a tensor in several formats."""

import math

import pytest
import torch
from mqo.quant.backend import fake_quantize
from mqo.quant.comparison import compare_formats, sqnr
from mqo.quant.formats import FORMATS
from mqo.quant.spec import QuantSpec

X = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("axis", [0, -1])
def test_sqnr_is_the_ratio_of_energies(name, axis):
    error = (X - fake_quantize(X, QuantSpec(name), axis=axis)).double()
    expected = 10 * math.log10(X.double().square().sum() / error.square().sum())
    assert sqnr(X, name, axis=axis) == pytest.approx(expected, rel=1e-6)


def test_sqnr_without_noise_and_without_a_signal():
    assert sqnr(torch.ones(4, 32), "mxfp4") == math.inf
    assert math.isnan(sqnr(torch.zeros(4, 32), "mxfp4"))


def test_stochastic_rounding_needs_a_seed():
    spec = QuantSpec("mxfp4", rounding="stochastic")
    assert sqnr(X, spec, seed=1) < sqnr(X, "mxfp4")
    with pytest.raises(ValueError, match="seed"):
        sqnr(X, spec)


@pytest.mark.parametrize("name", ["none", "fp8_tensor", "mixed"])
def test_a_name_that_is_no_format_is_refused(name):
    with pytest.raises(ValueError, match=name):
        sqnr(X, name)


def test_formats_are_compared_in_their_order():
    specs = ["nvfp4", QuantSpec("mxfp4", block=16)]
    comparison = compare_formats(X.clone().requires_grad_(), specs)
    assert [error.label for error in comparison.errors] == ["nvfp4 1x16", "mxfp4 1x16"]
    assert [e.spec.quant_type for e in compare_formats(X).errors] == list(FORMATS)
    head, *lines = str(comparison).splitlines()
    assert head.split()[:2] == ["format", "SQNR"] and len(lines) == 2
    assert float(lines[0].split()[2]) == pytest.approx(sqnr(X, "nvfp4"), abs=0.005)
    assert max(map(len, str(compare_formats(X)).splitlines())) <= 80


def test_the_plot_has_a_bar_for_each_finite_ratio(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    comparison = compare_formats(X, ["nvfp4", "mxfp4", "mxfp8"])
    axes = comparison.plot()
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == sorted(sqnr(X, name) for name in ("nvfp4", "mxfp4", "mxfp8"))
    assert len(compare_formats(torch.zeros(1, 32)).plot().patches) == 0


def test_choices_that_differ_are_in_the_labels(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    rules = ("floor", "even", "ceil")
    comparison = compare_formats(X, [QuantSpec("mxfp4", scale_rule=rule) for rule in rules])
    labels = [error.label for error in comparison.errors]
    assert labels == ["mxfp4 1x32", "mxfp4 1x32 even", "mxfp4 1x32 ceil"]
    assert len({bar.get_y() for bar in comparison.plot().patches}) == 3


def test_one_format_needs_no_list():
    assert [e.spec for e in compare_formats(X, "mxfp4").errors] == [QuantSpec("mxfp4")]
