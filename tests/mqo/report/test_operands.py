"""Maps of what quantizers measured."""

import math

from mqo.report.operands import COLUMNS, OUTSIDE, maps, ranges

LAYER = "quant/fprop/decoder.layers.{}.mlp.linear_fc1/x/{}"


def test_a_value_is_the_mean_of_a_blocks_layers_and_of_the_runs():
    one = {LAYER.format(0, "sqnr_db"): [(1, 20.0), (10, 10.0)]}
    one |= {"quant/fprop/decoder.layers.0.mlp.linear_fc2/x/sqnr_db": [(1, 30.0)]}
    other = {LAYER.format(0, "sqnr_db"): [(1, 40.0)], LAYER.format(10, "sqnr_db"): [(10, 7.0)]}
    (found,) = maps([one, other])
    assert (found.operand, found.quantity) == ("fprop.x", "sqnr_db")
    assert (found.steps, found.blocks) == ((1, 10), (0, 10))
    assert found.values[0] == (30.0, 10.0)
    assert math.isnan(found.values[1][0]) and found.values[1][1] == 7.0


def test_operands_come_as_a_step_meets_them_and_other_metrics_do_not_come():
    names = ["lm loss", "quant/wgrad/output_layer/x/underflow", "quant/fprop/output_layer/x/amax"]
    names += [LAYER.format(3, name) for name in ("saturation", "sqnr_db", "scale_exponent")]
    found = maps([{name: [(1, 0.5)] for name in names}])
    assert [(one.operand, one.quantity) for one in found] == [
        ("fprop.x", "sqnr_db"),
        ("fprop.x", "saturation"),
        ("wgrad.x", "underflow"),
    ]
    assert (found[-1].blocks, found[-1].rows) == ((OUTSIDE,), ["other"])
    assert maps([{}]) == []


def test_of_many_steps_some_are_shown_with_both_ends():
    series = [(step, float(step)) for step in range(1, 1001)]
    (found,) = maps([{LAYER.format(0, "sqnr_db"): series}])
    assert len(found.steps) == COLUMNS
    assert (found.steps[0], found.steps[-1]) == (1, 1000)


def test_ranges_leave_out_what_is_not_finite():
    series = [(1, 3.0), (2, math.inf), (3, 5.0)]
    assert ranges(maps([{LAYER.format(0, "sqnr_db"): series}])) == {"sqnr_db": (3.0, 5.0)}
