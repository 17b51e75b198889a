"""Break down a step's time from the Chrome trace of torch's profiler."""

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mqo.errors import RunError

Spans = list[tuple[float, float]]  # in microseconds
STEP = "ProfilerStep#"
# The parts; each excludes those before it: a quantizer in a forward pass is not counted as forward.
COMMUNICATION, QUANTIZATION = "communication", "quantization"
PARTS = (COMMUNICATION, QUANTIZATION, "data", "optimizer", "backward", "forward")
REST = "other"
# Ranges on the host: upstream's timers (mqo/megatron/run/profiler_ranges.py), and torch's own,
# which include the quantizers' autograd function, so that it needs no label.
_HOST = {
    "all-grads-sync": COMMUNICATION,
    "_StraightThrough": QUANTIZATION,
    "batch-generator": "data",
    "optimizer": "optimizer",
    "backward-compute": "backward",
    "forward-compute": "forward",
}
_COLLECTIVES = ("c10d::", "gloo:", "nccl:")
# A GPU's kernels run asynchronously; timers wait for them, collectives do not.
_KERNELS = {"nccl": COMMUNICATION, "_kernel": QUANTIZATION}


@dataclass(frozen=True)
class Breakdown:
    """The mean seconds of a step by part, including `REST`, over the profiled `steps`."""

    steps: int
    seconds: Mapping[str, float]

    @property
    def step(self) -> float:
        """Return the seconds of a step."""
        return sum(self.seconds.values())

    def share(self, part: str) -> float:
        """Return the share of a part in a step."""
        return self.seconds[part] / self.step


def read(file: Path) -> Breakdown:
    """Return the breakdown of a trace, compressed or not; RunError without a step."""
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8", errors="replace") as text:
        return breakdown(json.load(text)["traceEvents"])


def breakdown(events: Iterable[Mapping[str, Any]]) -> Breakdown:
    """Return the breakdown of a trace's events; RunError without a step."""
    whole = [event for event in events if event.get("ph") == "X"]
    host = [event for event in whole if event.get("cat") in ("user_annotation", "cpu_op")]
    kernels = [event for event in whole if event.get("cat") == "kernel"]
    windows = [_span(event) for event in host if event["name"].startswith(STEP)]
    if not windows:
        raise RunError("The trace has no step", expected=f"ranges called {STEP}N")
    spans: dict[str, Spans] = {part: [] for part in PARTS}
    for event in host:
        name = event["name"]
        part = COMMUNICATION if name.startswith(_COLLECTIVES) else _HOST.get(name)
        if part and not (kernels and part in _KERNELS.values()):
            spans[part].append(_span(event))
    for event in kernels:
        for start, part in _KERNELS.items():
            if event["name"].startswith(start):
                spans[part].append(_span(event))
    return _parts(spans, windows, len(windows))


def _parts(spans: Mapping[str, Spans], windows: Spans, steps: int) -> Breakdown:
    """Return each part's time within the steps, without the time of parts before it."""
    edges = np.unique(np.concatenate([windows, *filter(None, spans.values())]))
    left, seconds = _covered(edges, windows), {}
    for part in PARTS:
        taken = left & _covered(edges, spans[part])
        left &= ~taken
        seconds[part] = np.diff(edges)[taken].sum() / steps / 1e6
    return Breakdown(steps, seconds | {REST: np.diff(edges)[left].sum() / steps / 1e6})


def _covered(edges: np.ndarray, spans: Spans) -> np.ndarray:
    """Return which intervals between neighboring `edges` are inside a span."""
    depth = np.zeros(len(edges), int)
    for bounds, change in zip(np.reshape(spans, (-1, 2)).T, (1, -1), strict=True):
        np.add.at(depth, np.searchsorted(edges, bounds), change)
    return depth.cumsum()[:-1] > 0


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    start = float(event["ts"])
    return start, start + float(event["dur"])
