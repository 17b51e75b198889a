"""Timers as ranges of a trace: a small timer in the place of upstream's."""

from argparse import Namespace

import pytest
import torch
from mqo.megatron.run.profiler_ranges import LABELED, label, label_timers
from mqo.quant.gemms import gemm_operands
from torch.profiler import ProfilerActivity, profile


class Timer:
    def __init__(self, name):
        self.name, self.calls = name, []

    def start(self, barrier=False):
        self.calls.append(("start", barrier))

    def stop(self, barrier=False):
        self.calls.append(("stop", barrier))


@pytest.fixture
def timer():
    """The class, labeled."""
    made = type("Labeled", (Timer,), {"start": Timer.start, "stop": Timer.stop})
    label(made)
    return made


def names(watched):
    return {event.key for event in watched.key_averages()}


def test_what_runs_between_start_and_stop_is_a_range(timer):
    outer, inner, other = (timer(n) for n in ("forward-compute", "batch-generator", "interval"))
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        for one in (other, outer, inner):
            one.start(barrier=True)
        torch.ones(2).sum()
        for one in (inner, outer, other):
            one.stop()
    assert names(watched) & {*LABELED, "interval"} == {"forward-compute", "batch-generator"}
    assert outer.calls == [("start", True), ("stop", False)]


def test_a_timer_starts_again(timer):
    one = timer("optimizer")
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        for _ in range(3):
            one.start()
            one.stop()
    (found,) = (event for event in watched.key_averages() if event.key == "optimizer")
    assert found.count == 3


@pytest.mark.parametrize(("profiled", "torchs"), [(False, True), (True, False), (False, False)])
def test_a_run_without_torchs_profiler_keeps_its_timers(profiled, torchs):
    timers = pytest.importorskip("megatron.core.timers")
    before = timers.Timer.start
    label_timers(Namespace(profile=profiled, use_pytorch_profiler=torchs))
    assert timers.Timer.start is before


def test_the_quantizers_are_ranges_without_a_label():
    """What `mqo perf` takes for them is torch's own name of their autograd function."""
    operands = gemm_operands("fprop", "mxfp8", torch.nn.Parameter(torch.ones(2, 32)))
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        operands.lhs(torch.ones(2, 32))
    assert "_StraightThrough" in names(watched)
