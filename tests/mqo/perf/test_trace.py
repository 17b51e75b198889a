"""Where a step's time goes, from small traces of our own; times in microseconds."""

import gzip
import json

import pytest
from mqo.errors import RunError
from mqo.perf.trace import PARTS, REST, breakdown, read


def event(name, start, end, cat="user_annotation"):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start}


STEP = [
    event("ProfilerStep#4", 0, 1000),
    event("forward-compute", 50, 450),
    event("batch-generator", 50, 80),
    event("_StraightThrough", 100, 150, "cpu_op"),
    event("aten::mm", 150, 300, "cpu_op"),
    event("backward-compute", 450, 800),
    event("_StraightThrough", 500, 520, "cpu_op"),
    event("all-grads-sync", 800, 850),
    event("c10d::allreduce_", 840, 860, "cpu_op"),
    event("optimizer", 850, 950),
    {"ph": "i", "cat": "user_annotation", "name": "a mark", "ts": 3},
    event("forward-compute", 2000, 3000),  # of a step that was not profiled
]


def microseconds(found):
    return {part: round(1e6 * seconds, 6) for part, seconds in found.seconds.items()}


def test_each_part_is_without_what_runs_in_it():
    found = breakdown(STEP)
    assert microseconds(found) == {
        "communication": 60,
        "quantization": 70,
        "data": 30,
        "optimizer": 90,
        "backward": 330,
        "forward": 320,
        REST: 100,
    }
    assert found.step == pytest.approx(1e-3)
    assert found.share(REST) == pytest.approx(0.1)


def test_the_numbers_are_of_a_mean_step():
    later = [{**one, "ts": one["ts"] + 1500} for one in STEP[:4]]
    found = breakdown([*STEP[:-1], *later])
    assert found.steps == 2
    assert microseconds(found)["quantization"] == (70 + 50) / 2
    assert sum(microseconds(found).values()) == 1000


def test_a_gpus_kernels_say_what_runs_beside_the_host():
    kernels = [event("_kernel", 200, 240, "kernel"), event("ncclDevKernel_A", 700, 790, "kernel")]
    found = microseconds(breakdown([*STEP, *kernels, event("gemm", 0, 999, "kernel")]))
    assert (found["quantization"], found["communication"]) == (40, 90)


def test_a_trace_is_read_packed_or_not(tmp_path):
    text = json.dumps({"traceEvents": STEP})
    plain, packed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    assert read(plain) == read(packed) == breakdown(STEP)


def test_a_trace_without_a_step_is_refused():
    with pytest.raises(RunError, match="ProfilerStep#N"):
        breakdown(STEP[1:])


def test_time_is_never_counted_twice():
    """Spans of one part overlap, touch, are empty and reach beyond the step."""
    spans = [(5, 7), (0, 3), (2, 4), (6, 6.5), (9, 9), (990, 1010)]
    steps = [event("ProfilerStep#1", 1, 1000), *(event("optimizer", *span) for span in spans)]
    found = microseconds(breakdown([*steps, event("forward-compute", 3, 6)]))
    assert (found["optimizer"], found["forward"]) == (3 + 2 + 10, 1)
    assert found[REST] == 999 - 16
    assert REST not in PARTS
