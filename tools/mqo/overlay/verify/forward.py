"""Run one forward and backward pass of a small GPT in the patched tree, and judge it.

Code that needs torch or Megatron runs in separate processes (Megatron-LM/tools/verify_forward.py in
that tree), which only report.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mqo.errors import MqoError, RunError
from mqo.overlay.quant_types.gemms import ATTEND, SITES
from mqo.overlay.series import Series
from mqo.overlay.snapshot import snapshot
from mqo.overlay.tree import Tree
from mqo.program import at_once, call

PROGRAM = "tools/verify_forward.py"
QUANT_TYPE = "mxfp8"
SITE_ENTRY = "quant_sites"
TIME_LIMIT_S = 300
FUSED_TOLERANCE = 1e-5  # relative, in fp32: the same sums in another order
Outcome = Literal["run", "compiled only", "failed", "not tried"]


@dataclass(frozen=True)
class Forward:
    """The outcome of the check; `lacks` is a package that it needs and this machine lacks."""

    outcome: Outcome
    lacks: str = ""
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """What the program reports of one forward and backward pass.

    `loss` is in nats, `fused_loss` the same with fused attention (None: it refused), `gradients` a
    hash of all gradients. `records` counts (site, layer, quant type) by operands that were
    quantized exactly once; `lacks` names a package that is not installed, and `error` the last
    line of a failure.
    """

    loss: float = float("nan")
    fused_loss: float | None = None
    gradients: str = ""
    finite: bool = False
    linear_layers: Sequence[str] = ()
    attention_layers: Sequence[str] = ()
    records: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    lacks: str = ""
    error: str = ""

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Step:
        """Read the program's JSON."""
        rows = table.get("records", ())
        once = ((s, layer, kind) for s, layer, _, kind, calls in rows if calls == 1)
        return cls(**table | {"records": Counter(once)})


def try_forward(tree: Tree, series: Series, folder: Path) -> Forward:
    """Run a step without the sites, one at 'none' and one quantized, in snapshots in `folder`."""
    bare, none, quantized = folder / "bare", folder / "none", folder / "quantized"
    try:
        snapshot(tree, bare, types={}, without=(SITE_ENTRY,), series=series)
        snapshot(tree, none, types={}, series=series)
        snapshot(tree, quantized, types=dict.fromkeys(SITES, QUANT_TYPE), series=series)
    except MqoError as error:
        return Forward("failed", faults=(str(error),))
    first = _step(bare)
    if first.lacks:
        return Forward("compiled only", first.lacks)
    faults = judge(first, *at_once(_step, (none, quantized), threads=2))
    return Forward("failed" if faults else "run", faults=tuple(faults))


def _step(root: Path) -> Step:
    """Return what the program in the tree at `root` reports: on the CPU, in its own process."""
    # One thread: sums in another order would differ in the last bit. No compiler: none is needed.
    chosen = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "CC": "none", "CXX": "none"}
    try:
        facts = call(root / PROGRAM, "run", {}, variables=chosen, limit_s=TIME_LIMIT_S)
    except RunError as error:
        return Step(error=error.found)
    return Step.from_table(facts)


def judge(bare: Step, none: Step, quantized: Step) -> list[str]:
    """Return what is wrong with the steps without sites, with sites at 'none', and quantized.

    All must be finite; the first two must be bit-equal, with nothing recorded. The second must have
    the same loss with fused attention. The third must differ, and must have quantized both operands
    of each site of each layer exactly once.
    """
    steps = {f"without {SITE_ENTRY}": bare, "at none": none, f"at {QUANT_TYPE}": quantized}
    failed = [f"{name}: {s.error or s.lacks}" for name, s in steps.items() if s.error or s.lacks]
    if failed:
        return failed
    faults = [f"{name}: not finite" for name, step in steps.items() if not step.finite]
    if (bare.loss, bare.gradients) != (none.loss, none.gradients):
        faults.append(f"at none: the loss or a gradient differs from those without {SITE_ENTRY}")
    for name in list(steps)[:2]:
        if steps[name].records:
            faults.append(f"{name}: something was quantized")
    if quantized.loss == none.loss or quantized.gradients == none.gradients:
        faults.append(f"at {QUANT_TYPE}: the loss or every gradient equals that of none")
    if none.fused_loss is None:
        faults.append("at none: fused attention refuses to run")
    elif not math.isclose(none.fused_loss, none.loss, rel_tol=FUSED_TOLERANCE):
        text = f"the loss with fused attention is {none.fused_loss}, otherwise {none.loss}"
        faults.append(f"at none: {text}")
    return faults + _record_faults(quantized)


def _record_faults(step: Step) -> list[str]:
    """Return one line per site and count for layers that did not quantize two operands."""
    wanted = {
        (site, layer, QUANT_TYPE): 2
        for site in SITES
        for layer in (step.attention_layers if site in ATTEND else step.linear_layers)
    }
    layers: dict[tuple[str, str, int, int], list[str]] = {}
    for key in sorted(set(wanted) | set(step.records)):
        site, layer, quant_type = key
        counts = (step.records.get(key, 0), wanted.get(key, 0))
        if counts[0] != counts[1]:
            layers.setdefault((site, quant_type, *counts), []).append(layer)
    return [
        f"at {quant_type}: {site} of {names[0]}"
        + (f" and {len(names) - 1} more" if names[1:] else "")
        + f" quantized {count} operands once, not {right}"
        for (site, quant_type, count, right), names in layers.items()
    ]
