"""The guard's texts: nothing when a run did as asked, one for every fault."""

import pytest
import torch
from megatron.quant import RECORDER, SITES, QuantRecord, gemm_operands, missing


def records(site, kind, layer="decoder.layers.0.mlp.linear_fc1", operands=None):
    operands = operands or (SITES[site].lhs, SITES[site].rhs)
    return [QuantRecord(site, layer, operand, kind, 7, 1, 1.0, 0.1) for operand in operands]


@pytest.mark.parametrize("site", SITES)
def test_a_run_that_did_as_asked_has_no_fault(site):
    asked = {**dict.fromkeys(SITES, "none"), site: "mxfp8"}
    assert missing(asked, records(site, "mxfp8")) == []
    assert missing({site: "mxfp8"}, iter(records(site, "mxfp8"))) == []


def test_nothing_asked_and_nothing_run_is_no_fault():
    assert missing({}, []) == missing(dict.fromkeys(SITES, "none"), []) == []


def test_a_site_that_never_ran_is_named():
    asked = {"fprop": "mxfp8", "qk": "mxfp8", "pv": "none"}
    assert missing(asked, records("fprop", "mxfp8")) == [
        "qk: asked for mxfp8, but its quantiser never ran"
    ]


def test_a_record_without_calls_is_a_site_that_never_ran():
    idle = QuantRecord("qk", "a", "query", "mxfp8", 0, 0, 0.0, 0.0)
    assert missing({"qk": "mxfp8"}, [idle]) == ["qk: asked for mxfp8, but its quantiser never ran"]


def test_another_type_is_named_with_its_layers():
    ran = records("qk", "hifp8", "a") + records("qk", "hifp8", "b") + records("qk", "mxfp8", "c")
    assert missing({"qk": "mxfp8"}, ran) == [
        "qk: asked for mxfp8, but a and 1 more ran as hifp8",
    ]


@pytest.mark.parametrize("asked", [{}, {"wgrad": "none"}])
def test_a_site_that_ran_unasked_is_named(asked):
    assert missing(asked, records("wgrad", "mxfp4", "a")) == [
        "wgrad: asked for none, but a ran as mxfp4"
    ]


def test_an_operand_that_stayed_out_is_named():
    ran = records("pv", "mxfp8", operands=("probs",))
    assert missing({"pv": "mxfp8"}, ran) == ["pv: ran as mxfp8, but its operand value never did"]


def test_faults_come_in_the_order_of_the_sites():
    faults = missing({"pv": "mxfp8", "fprop": "hifp8"}, records("qk", "mxfp4", "a"))
    assert [fault.split(":")[0] for fault in faults] == ["fprop", "qk", "pv"]


def test_the_recorders_entries_are_what_the_guard_reads():
    q = gemm_operands("qk", "mxfp8", None)
    q.lhs(torch.ones(2, 1, 32))
    assert missing({"qk": "mxfp8"}, RECORDER.entries()) != []
    q.rhs(torch.ones(2, 1, 32))
    assert missing({"qk": "mxfp8"}, RECORDER.entries()) == []


@pytest.mark.parametrize(
    ("asked", "valid"),
    [({"linear": "mxfp8"}, "valid: fprop, dgrad"), ({"qk": "bf16"}, "valid: none, mxfp8")],
)
def test_an_unknown_site_or_type_is_refused(asked, valid):
    with pytest.raises(ValueError, match=valid):
        missing(asked, [])
