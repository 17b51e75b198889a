"""The resolved table: which options change an entry, compared with what the quantizers compute."""

import itertools
from dataclasses import replace

import pytest
import torch
from mqo.quant.backend import fake_quantize
from mqo.quant.config import parse
from mqo.quant.formats import FORMATS, SITES
from mqo.quant.options import OPTIONS
from mqo.quant.quant_config import QuantConfig
from mqo.quant.spec import QuantSpec
from mqo.quant.table import (
    READ_TABLES,
    entries,
    layer_specs,
    phase_types,
    readers,
    unread,
    unread_patterns,
    unread_rows,
    unread_schedules,
)

SPEC_OPTIONS = ("block", "scale_rule", "rounding", "overflow", "tensor_scale")
LAYERS = {site: ["a", "b"] for site in SITES}


def a_mixture():
    """Return values that every option of a spec shows in: many sizes, ties and overflow."""
    torch.manual_seed(0)
    wide = torch.randn(64, 256) * torch.exp2(torch.randint(-12, 17, (64, 256)).float())
    ties = torch.arange(64 * 256).reshape(64, 256) / 64
    return torch.cat([wide, torch.randn(64, 256) * 1e-3, ties, torch.full((1, 256), 1e6)])


@pytest.mark.parametrize("quant_type", FORMATS)
@pytest.mark.parametrize("name", SPEC_OPTIONS)
def test_an_option_is_read_where_it_changes_a_quantized_value(quant_type, name):
    x, default = a_mixture(), QuantSpec(quant_type)
    values, results = OPTIONS[name].valid, []
    if name == "scale_rule":
        values = FORMATS[quant_type].scale_rules or values
    for value in values:
        spec = replace(default, **{name: value})
        results.append(fake_quantize(x, spec, axis=-1, seed=7))
    changes = any(not one.equal(results[0]) for one in results)
    config = QuantConfig(asked={"fprop": quant_type}, **{name: values[0]})
    assert changes is not unread(config, name)


@pytest.mark.parametrize("name", [n for n in OPTIONS if OPTIONS[n].table in READ_TABLES])
@pytest.mark.parametrize("quant_type", FORMATS)
def test_an_option_is_unread_exactly_where_no_value_changes_an_entry(quant_type, name):
    option = OPTIONS[name]
    values = option.valid or (((), (1,), (2,)) if option.many else (0, 1, 50))
    for site, rounding in itertools.product(SITES, (None, "stochastic")):
        config = QuantConfig(asked={site: quant_type}, rounding=rounding)
        tables = [entries(replace(config, **{name: value})) for value in values]
        same = all(table == tables[0] for table in tables)
        for value in values:
            # A format reads only its own rules.
            unused = name == "scale_rule" and value not in FORMATS[quant_type].scale_rules
            assert unread(replace(config, **{name: value}), name) == (same or unused)


def test_what_is_unquantized_reads_nothing():
    assert entries(QuantConfig(asked=dict.fromkeys(SITES, "none"), rounding="stochastic")) == set()
    assert all(unread(QuantConfig(), n) for n in OPTIONS if OPTIONS[n].table in READ_TABLES)


def test_readers_are_types_and_sites():
    mx = tuple(name for name, row in FORMATS.items() if row.is_mx)
    assert readers("block") == (mx, tuple(SITES), False)
    assert readers("scale_rule", "rceil") == readers("block")
    two_levels = tuple(name for name, row in FORMATS.items() if row.scale == "two-level")
    assert readers("scale_rule", "four-over-six-mae") == (two_levels, tuple(SITES), False)
    assert readers("smooth_key")[1] == ("qk", "qk_recompute", "dq")
    assert readers("save_activations")[1] == ("fprop",)
    assert readers("cache_weights")[1] == ("fprop", "dgrad")
    assert readers("seed") == (tuple(FORMATS), tuple(SITES), True)


def test_a_ruled_layer_uses_the_defaults_of_its_type():
    config = parse(
        '[asked]\nwgrad = "nvfp4"\n[quantizer]\ncache_weights = true\n[operands]\n'
        '"wgrad.grad" = { rounding = "stochastic", hadamard = 16, gain = 0.75 }\n'
        '"wgrad.x" = { hadamard = 16 }\n'
        '[[rules]]\nlayers = "linear:a"\nquant_type = "mxfp8"\n'
    )
    ruled = {entry.choices for entry in entries(config, LAYERS) if entry.assigned}
    assert ruled == {"mxfp8 1x32 nearest-even floor"}
    grad, x = (config.operand_spec("wgrad", operand, "b", "nvfp4") for operand in ("grad", "x"))
    assert (grad.hadamard.points, grad.gain, grad.spec.rounding) == (16, 0.75, "stochastic")
    assert x.hadamard == grad.hadamard
    assert config.operand_spec("wgrad", "grad", "a", "nvfp4").is_plain


def test_a_later_phase_uses_the_defaults_of_its_type():
    config = parse(
        '[asked]\nfprop = "nvfp4"\n[schedule]\nfprop = "nvfp4 until 5, then mxfp4"\n'
        '[operands]\n"fprop.weight" = { tile = "square" }\n'
    )
    weights = (entry for entry in entries(config) if entry.operand == "weight")
    tiles = {(entry.site_type, entry.operand_spec.spec.tile) for entry in weights}
    assert tiles == {("nvfp4", "square"), ("mxfp4", "row")}


def test_phases_that_never_begin_are_left_out():
    config = parse('[asked]\nqk = "mxfp8"\n[schedule]\nqk = "mxfp8 until 8, then none"\n')
    assert phase_types(config, "qk", 8) == ["mxfp8"]
    assert phase_types(config, "qk", 9) == ["mxfp8", "none"]
    assert unread_schedules(config, 8) == ["qk"]
    assert unread_schedules(config, 9) == unread_schedules(config) == []
    share = parse('[asked]\nqk = "mxfp8"\n[schedule]\nqk = "mxfp8 until 0.5, then none"\n')
    assert phase_types(share, "qk", 8) == phase_types(share, "qk") == ["mxfp8", "none"]


def test_an_exclude_is_unread_if_no_layer_changes():
    config = parse(
        '[asked]\nfprop = "mxfp8"\n[layers]\nexclude = ["a", "qk:*", "linear:a", "b*"]\n'
    )
    assert unread_patterns(config, "exclude", None) == ["qk:*"]
    # Two cover the same layer.
    assert unread_patterns(config, "exclude", LAYERS) == ["a", "qk:*", "linear:a"]
    specs = layer_specs(config, LAYERS)["fprop", "b"]
    assert {spec.spec.quant_type for spec in specs} == {"none"}


def test_a_row_is_unread_if_no_entry_changes():
    config = parse(
        '[asked]\nfprop = "nvfp4"\ndgrad = "mxfp4"\n[operands]\n'
        '"fprop.x" = { scale_rule = "rceil", rounding = "stochastic" }\n'
        '"dgrad.grad" = { scale_rule = "even" }\n"dgrad.weight" = { tile = "square" }\n'
        '"wgrad.x" = { tile = "square" }\n'
    )
    assert unread_rows(config) == [("fprop.x", "scale_rule"), ("wgrad.x", "tile")]
