"""Where a step's time goes, from the Chrome trace that torch's profiler wrote."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqo.errors import RunError

Spans = list[tuple[float, float]]  # of microseconds, in order, apart from each other
STEP = "ProfilerStep#"
# The parts, each without those before it: a quantizer that runs in a forward pass is no forward.
COMMUNICATION, QUANTIZATION = "communication", "quantization"
PARTS = (COMMUNICATION, QUANTIZATION, "data", "optimizer", "backward", "forward")
REST = "other"
# Ranges of the host: upstream's timers (megatron/run/labels.py), and what torch itself names. The
# quantizers' autograd function is one of those, and therefore labeled at no cost.
_HOST = {
    "all-grads-sync": COMMUNICATION,
    "_StraightThrough": QUANTIZATION,
    "batch-generator": "data",
    "optimizer": "optimizer",
    "backward-compute": "backward",
    "forward-compute": "forward",
}
_COLLECTIVES = ("c10d::", "gloo:", "nccl:")
# A GPU's kernels run beside the host, which its timers wait for and its collectives do not.
_KERNELS = {"nccl": COMMUNICATION, "_kernel": QUANTIZATION}


@dataclass(frozen=True)
class Breakdown:
    """The seconds of a mean step by part, `REST` among them, over so many profiled `steps`."""

    steps: int
    seconds: Mapping[str, float]

    @property
    def step(self) -> float:
        """Return the time of a whole step."""
        return sum(self.seconds.values())

    def share(self, part: str) -> float:
        """Return the share of a whole step."""
        return self.seconds[part] / self.step


def read(file: Path) -> Breakdown:
    """The breakdown of a trace, packed or not; RunError where it has no whole step."""
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8", errors="replace") as text:
        return breakdown(json.load(text)["traceEvents"])


def breakdown(events: Iterable[Mapping[str, Any]]) -> Breakdown:
    """What `read` says, of a trace's events."""
    whole = [event for event in events if event.get("ph") == "X"]
    host = [event for event in whole if event.get("cat") in ("user_annotation", "cpu_op")]
    kernels = [event for event in whole if event.get("cat") == "kernel"]
    windows = [_span(event) for event in host if event["name"].startswith(STEP)]
    if not windows:
        raise RunError("The trace holds no step", expected=f"ranges called {STEP}N")
    found: dict[str, Spans] = {part: [] for part in PARTS}
    for event in host:
        part = _of_host(event["name"])
        if part and not (kernels and part in _KERNELS.values()):
            found[part].append(_span(event))
    for event in kernels:
        for start, part in _KERNELS.items():
            if event["name"].startswith(start):
                found[part].append(_span(event))
    return _parts(found, union(windows), len(windows))


def _parts(found: Mapping[str, Spans], windows: Spans, steps: int) -> Breakdown:
    """Each part's time within the steps that no part before it has taken."""
    left, seconds = windows, {}
    for part in PARTS:
        rest = without(left, union(found[part]))
        seconds[part] = (total(left) - total(rest)) / steps / 1e6
        left = rest
    return Breakdown(steps, seconds | {REST: total(left) / steps / 1e6})


def _of_host(name: str) -> str | None:
    if name.startswith(_COLLECTIVES):
        return COMMUNICATION
    return _HOST.get(name)


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """The time that any of the spans covers."""
    made: Spans = []
    for start, end in sorted(spans):
        if made and start <= made[-1][1]:
            made[-1] = made[-1][0], max(end, made[-1][1])
        else:
            made.append((start, end))
    return made


def without(spans: Spans, taken: Spans) -> Spans:
    """The time of `spans` that `taken` does not cover; both as `union` makes them."""
    made: Spans = []
    at = 0
    for first, end in spans:
        start = first
        while at < len(taken) and taken[at][1] <= start:
            at += 1
        n = at
        while n < len(taken) and taken[n][0] < end:
            if taken[n][0] > start:
                made.append((start, taken[n][0]))
            start = max(start, taken[n][1])
            n += 1
        if start < end:
            made.append((start, end))
    return made


def total(spans: Spans) -> float:
    """Return the sum in microseconds."""
    return sum(end - start for start, end in spans)
