"""Schedules: what they say of each step, how they are read, and that operands follow them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mqo.quant.config import current
from mqo.quant.gemms import gemm_operands
from mqo.quant.progress import set_step
from mqo.quant.record import RECORDER
from mqo.quant.schedule import Phase, parse_schedule, type_at


def test_a_share_ends_at_that_share_of_all_steps():
    schedule = parse_schedule("mxfp4 until 0.9, then bf16")
    types = [type_at(schedule, step, 20) for step in range(20)]
    assert types == ["mxfp4"] * 18 + ["none"] * 2
    assert [phase.ends(20) for phase in schedule] == [18, None]


def test_a_step_ends_before_that_step():
    schedule = parse_schedule("none until 3, mxfp8 until 5, then hifp8")
    types = [type_at(schedule, step, None) for step in range(7)]
    assert types == ["none"] * 3 + ["mxfp8"] * 2 + ["hifp8"] * 2


def test_one_type_may_stand_alone():
    assert parse_schedule("mxfp8") == (Phase("mxfp8"),)


def test_a_type_may_be_unknown_where_it_is_only_read():
    text = "mxfp4 until 3, then gone"
    schedule = parse_schedule(text, any_type=True)
    assert [type_at(schedule, step, None) for step in (2, 3)] == ["mxfp4", "gone"]
    with pytest.raises(ValueError, match="gone"):
        parse_schedule(text)
    for wrong in ("gone until", "mxfp4 until 3", "a b", ""):
        with pytest.raises(ValueError, match="valid"):
            parse_schedule(wrong, any_type=True)


@given(st.integers(1, 10**6), st.integers(1, 99))
def test_a_share_is_reached_at_the_same_step_however_it_is_written(total, percent):
    whole = parse_schedule(f"mxfp8 until {percent / 100:.2f}, then none")
    assert whole[0].ends(total) == round(percent / 100 * total)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int8 until 0.5, then none", "'int8'; valid: none, mxfp8, mxfp4, hifp8"),
        ("mxfp8 until, then none", "phase 'mxfp8 until' .*; valid: TYPE until N"),
        ("mxfp8 until 0.5", "all types but the last"),
        ("mxfp8, then none", "all types but the last"),
        ("mxfp8 until 0.5, mxfp4 until 0.5, then none", "ends must increase"),
        ("mxfp8 until 100, mxfp4 until 0.5, then none", "all steps or all shares"),
        ("mxfp8 until 1.5, then none", "between 0 and 1"),
        (3, "schedule 3; valid: TYPE until N"),
    ],
)
def test_what_is_no_schedule_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_schedule(text)


def test_a_share_of_an_unknown_whole_is_refused():
    with pytest.raises(ValueError, match=r"mxfp8 at the share 0\.5"):
        type_at(parse_schedule("mxfp8 until 0.5, then none"), 0, None)


def test_operands_follow_the_schedule(options):
    options('[schedule]\nfprop = "mxfp4 until 0.5, then bf16"\n')
    x = torch.randn(4, 32)
    for step, same in ((0, False), (4, False), (5, True), (9, True)):
        set_step(step, total=10)
        assert gemm_operands("fprop", "mxfp4", None).lhs(x).equal(x) is same
        assert not gemm_operands("qk", "mxfp4", None).lhs(x).equal(x)
    assert {r.calls for r in RECORDER.entries() if r.site == "fprop"} == {2}


def test_a_wrong_schedule_names_its_file_and_key(options):
    path = options('[schedule]\nfprop = "mxfp4 until"\n')
    with pytest.raises(ValueError, match=rf"{path}: \[schedule\] fprop: .* 'mxfp4 until'"):
        current()
