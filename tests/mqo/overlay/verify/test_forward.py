from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqo.overlay.verify.forward import QUANT_TYPE, Step, judge

LINEAR, ATTENTION = ("layers.0.up", "layers.0.down"), ("layers.0.core",)
RECORDS = {(site, layer, QUANT_TYPE): 2 for site in ("fprop", "dgrad", "wgrad") for layer in LINEAR}
RECORDS |= {(site, layer, QUANT_TYPE): 2 for site in ("qk", "pv") for layer in ATTENTION}

NONE = Step(
    loss=5.25,
    fused_loss=5.25001,
    gradients="a1",
    finite=True,
    linear_layers=LINEAR,
    attention_layers=ATTENTION,
)
QUANTIZED = replace(NONE, loss=5.5, gradients="b2", records=RECORDS)


def test_equal_steps_at_none_and_a_quantized_one_are_faultless():
    assert judge(NONE, NONE, QUANTIZED) == []


@pytest.mark.parametrize("change", [{"loss": 5.2500001}, {"gradients": "a2"}])
def test_none_must_be_bit_equal_to_a_model_without_sites(change):
    (fault,) = judge(NONE, replace(NONE, **change), QUANTIZED)
    assert "differs from those without quant_sites" in fault


@pytest.mark.parametrize(("loss", "fault"), [(None, "refuses"), (5.2502, "is 5.2502, otherwise")])
def test_fused_attention_must_reach_the_loss_at_none(loss, fault):
    (found,) = judge(NONE, replace(NONE, fused_loss=loss), QUANTIZED)
    assert fault in found
    assert judge(replace(NONE, fused_loss=loss), NONE, replace(QUANTIZED, fused_loss=loss)) == []


@pytest.mark.parametrize("change", [{"loss": 5.25}, {"gradients": "a1"}])
def test_quantizing_must_change_the_loss_and_the_gradients(change):
    (fault,) = judge(NONE, NONE, replace(QUANTIZED, **change))
    assert "equals that of none" in fault


@pytest.mark.parametrize(("at", "name"), [(0, "without quant_sites"), (1, "at none")])
def test_nothing_may_be_quantized_at_none(at, name):
    steps = [NONE, NONE, QUANTIZED]
    steps[at] = replace(NONE, records={("fprop", LINEAR[0], QUANT_TYPE): 2})
    assert judge(*steps) == [f"{name}: something was quantized"]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_every_step_must_be_finite(at):
    steps = [NONE, NONE, QUANTIZED]
    steps[at] = replace(steps[at], finite=False)
    (fault,) = judge(*steps)
    assert fault.endswith(": not finite")


@given(st.sampled_from(sorted(RECORDS)), st.sampled_from([0, 1, 3]))
def test_each_site_of_each_layer_must_quantize_two_operands_once(key, operands):
    (fault,) = judge(NONE, NONE, replace(QUANTIZED, records={**RECORDS, key: operands}))
    assert fault == f"at mxfp8: {key[0]} of {key[1]} quantized {operands} operands once, not 2"


def test_layers_with_the_same_fault_share_a_line():
    records = {key: 1 if key[0] == "dgrad" else n for key, n in RECORDS.items()}
    (fault,) = judge(NONE, NONE, replace(QUANTIZED, records=records))
    assert fault == "at mxfp8: dgrad of layers.0.down and 1 more quantized 1 operands once, not 2"


@pytest.mark.parametrize(
    "key",
    [
        ("qk", LINEAR[0], QUANT_TYPE),
        ("fprop", "another.layer", QUANT_TYPE),
        ("fprop", LINEAR[0], "mxfp4"),
    ],
)
def test_nothing_else_may_be_quantized(key):
    (fault,) = judge(NONE, NONE, replace(QUANTIZED, records={**RECORDS, key: 2}))
    assert fault.endswith("quantized 2 operands once, not 0")


@pytest.mark.parametrize("step", [Step(error="ValueError: odd"), Step(lacks="torch")])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_step_that_did_not_run_is_the_one_fault(step, at):
    steps = [NONE, NONE, QUANTIZED]
    steps[at] = step
    (fault,) = judge(*steps)
    assert fault.endswith(step.error or step.lacks)


def test_a_report_counts_the_operands_that_were_quantized_once():
    table = {"loss": 5.5, "fused_loss": None, "gradients": "b2", "finite": True}
    table |= {"linear_layers": ["up"], "attention_layers": []}
    rows = [("fprop", "up", "lhs", 1), ("fprop", "up", "rhs", 1), ("dgrad", "up", "lhs", 2)]
    table["records"] = [[site, layer, side, "mxfp8", n] for site, layer, side, n in rows]
    step = Step.from_table(table)
    assert dict(step.records) == {("fprop", "up", "mxfp8"): 2}
    assert (step.loss, step.linear_layers) == (5.5, ["up"])


def test_a_report_of_a_missing_package():
    assert Step.from_table({"lacks": "torch"}).lacks == "torch"
