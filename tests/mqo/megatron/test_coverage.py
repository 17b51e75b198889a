"""The guard's texts: nothing when a run did as asked, one for every fault."""

import math

import pytest
import torch
from mqo.megatron.coverage import (
    SiteCoverage,
    coverage_faults,
    idle_layers,
    ineffective,
    missing,
    site_coverage,
)
from mqo.quant.formats import SITES
from mqo.quant.gemms import gemm_operands
from mqo.quant.labels import Layer
from mqo.quant.record import RECORDER, QuantRecord


def records(site, kind, layer="decoder.layers.0.mlp.linear_fc1", operands=None):
    operands = operands or (SITES[site].lhs, SITES[site].rhs)
    return [QuantRecord(site, layer, operand, kind, 7, 1, 1.0, 0.1) for operand in operands]


@pytest.mark.parametrize("site", SITES)
def test_a_run_that_did_as_asked_has_no_fault(site):
    asked = {**dict.fromkeys(SITES, "none"), site: "mxfp8"}
    assert missing(asked, records(site, "mxfp8")) == []
    assert missing({site: "mxfp8"}, iter(records(site, "mxfp8"))) == []


def test_a_site_that_never_ran_is_named():
    asked = {"fprop": "mxfp8", "qk": "mxfp8", "pv": "none"}
    assert missing(asked, records("fprop", "mxfp8")) == [
        "qk: its type is mxfp8, but its quantizer never ran"
    ]


def test_a_record_without_calls_is_a_site_that_never_ran():
    idle = QuantRecord("qk", "a", "query", "mxfp8", 0, 0, 0.0, 0.0)
    assert missing({"qk": "mxfp8"}, [idle]) == [
        "qk: its type is mxfp8, but its quantizer never ran"
    ]


def test_another_type_is_named_with_its_layers():
    ran = records("qk", "hifp8", "a") + records("qk", "hifp8", "b") + records("qk", "mxfp8", "c")
    assert missing({"qk": "mxfp8"}, ran) == ["qk: its type is mxfp8, but a and 1 more ran as hifp8"]


@pytest.mark.parametrize("asked", [{}, {"wgrad": "none"}])
def test_a_site_that_ran_unasked_is_named(asked):
    assert missing(asked, records("wgrad", "mxfp4", "a")) == [
        "wgrad: its type is none, but a ran as mxfp4"
    ]


def test_an_operand_that_stayed_out_is_named():
    ran = records("pv", "mxfp8", operands=("probs",))
    assert missing({"pv": "mxfp8"}, ran) == ["pv: ran as mxfp8, but without its operand value"]


def test_faults_come_in_the_order_of_the_sites():
    faults = missing({"pv": "mxfp8", "fprop": "hifp8"}, records("qk", "mxfp4", "a"))
    assert [fault.split(":")[0] for fault in faults] == ["fprop", "qk", "pv"]


def test_the_recorders_entries_are_what_the_guard_reads():
    q = gemm_operands("qk", "mxfp8", None)
    q.lhs(torch.ones(2, 1, 32))
    assert missing({"qk": "mxfp8"}, RECORDER.entries()) != []
    q.rhs(torch.ones(2, 1, 32))
    assert missing({"qk": "mxfp8"}, RECORDER.entries()) == []


# -- layer by layer ----------------------------------------------------------------------------

TWO = [Layer(name, "linear", "ColumnParallelLinear") for name in ("a", "b")]


def test_a_rank_whose_layers_all_reached_their_sites_missed_nothing():
    ran = records("fprop", "mxfp8", "a") + records("fprop", "mxfp8", "b")
    found = site_coverage({"fprop": "mxfp8", "qk": "none"}, TWO, {"a", "b"}, ran)
    assert found == SiteCoverage()
    assert coverage_faults([found, SiteCoverage()]) == []


def test_one_layer_that_bypasses_the_site_is_named():
    found = site_coverage({"fprop": "mxfp8"}, TWO, {"a", "b"}, records("fprop", "mxfp8", "a"))
    assert coverage_faults([SiteCoverage(), found]) == [
        "fprop: b ran, but bypassed this site: exclude it"
    ]


def test_a_layer_with_one_operand_only_is_named():
    ran = records("fprop", "mxfp8", "a", operands=("x",))
    assert site_coverage({"fprop": "mxfp8"}, TWO[:1], {"a"}, ran).missed == {("fprop", "a")}


def test_each_site_is_held_to_its_own_kind_of_layers():
    layers = [*TWO[:1], Layer("core", "attention", "DotProductAttention")]
    asked = dict.fromkeys(SITES, "mxfp8")
    found = site_coverage(asked, layers, {"a", "core"}, [])
    sites = [fault.split(" ran")[0] for fault in coverage_faults([found])]
    of_layer = {"linear": "a", "attention": "core"}
    assert sites == [f"{site.name}: {of_layer[site.layer]}" for site in SITES.values()]


def test_excluded_and_frozen_layers_are_not_held_to_a_type(options):
    options('[layers]\nexclude = ["fprop:b"]\n')
    layers = [*TWO, Layer("c", "linear", "ColumnParallelLinear", frozen=True)]
    idle = QuantRecord("fprop", "b", "x", "excluded", 3, 0, 0.0, 0.0)
    ran = [*records("fprop", "mxfp8", "a"), idle]
    found = site_coverage({"fprop": "mxfp8"}, layers, {"a", "b", "c"}, ran)
    assert found == SiteCoverage()


def test_a_record_of_an_excluded_layer_is_no_record_of_quantizing():
    ran = [QuantRecord("fprop", "a", op, "excluded", 1, 0, 0.0, 0.0) for op in ("x", "weight")]
    assert site_coverage({"fprop": "mxfp8"}, TWO[:1], {"a"}, ran).missed == {("fprop", "a")}


def test_a_layer_that_never_ran_is_reported_and_no_fault():
    found = site_coverage({"fprop": "mxfp8"}, TWO, {"a"}, records("fprop", "mxfp8", "a"))
    assert coverage_faults([found]) == []
    assert idle_layers([found, SiteCoverage(idle=frozenset({"c"}))]) == ["b", "c"]


def test_a_layer_that_lost_its_name_is_a_fault():
    gemm_operands("dgrad", "mxfp8", None).lhs(torch.ones(4, 32))
    found = site_coverage({"dgrad": "mxfp8"}, [], set(), RECORDER.entries())
    (fault,) = coverage_faults([found])
    assert fault.startswith("dgrad: a layer lost its name")


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4", "hifp8"])
def test_an_expert_without_a_token_counts_as_site_coverage(kind):
    """Each GEMM as it is called with no token: fprop, dgrad and wgrad of an [8, 64] weight."""
    expert = torch.nn.Identity()
    expert.mqo_layer = "a"
    x, grad, weight = torch.ones(0, 64), torch.ones(0, 8), torch.ones(8, 64)
    for site, lhs, rhs in (("fprop", x, weight), ("dgrad", grad, weight), ("wgrad", grad, x)):
        operands = gemm_operands(site, kind, expert)
        assert operands.lhs(lhs).shape == lhs.shape
        assert operands.rhs(rhs).shape == rhs.shape
    asked = dict.fromkeys(("fprop", "dgrad", "wgrad"), kind)
    assert site_coverage(asked, TWO[:1], {"a"}, RECORDER.entries()) == SiteCoverage()
    assert missing(asked, RECORDER.entries()) == []


# -- quantizers without effect -----------------------------------------------------------------


def measured(site="fprop", operand="x", kind="mxfp8", signal=1.0, noise=0.0, layer="a", calls=1):
    return QuantRecord(site, layer, operand, kind, 7, calls, signal, noise)


def test_a_site_that_changed_nothing_is_named_with_its_type():
    (fault,) = ineffective([measured(), measured(operand="weight", calls=2, layer="b")])
    assert fault.startswith("fprop: ran as mxfp8, ")
    assert "3 measured calls of a and 1 more" in fault


@pytest.mark.parametrize(
    "other",
    [
        measured(operand="weight", noise=1e-300),  # the other operand
        measured(layer="b", noise=1e-9),  # another layer
        measured(layer="b", noise=math.nan),
        measured(layer="b", signal=math.nan),
    ],
)
def test_a_site_is_judged_by_all_its_operands_and_layers(other):
    assert ineffective([measured(), other]) == []


def test_each_site_and_type_is_judged_by_itself():
    effective = [measured("qk", "query", noise=0.1), measured(kind="mxfp4", noise=0.1)]
    assert len(ineffective([measured(), *effective])) == 1


@pytest.mark.parametrize(
    "record",
    [measured(signal=0.0), measured(calls=0, signal=0.0), measured(kind="excluded")],
    ids=["zeros", "unmeasured", "excluded"],
)
def test_without_a_signal_or_a_measurement_nothing_is_judged(record):
    assert ineffective([record]) == []
