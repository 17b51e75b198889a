"""Render the page of a simulation: one file that needs no other and no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mqo.report.page import as_script, packed, plotly_source, templates
from mqo.scale.devices import GIB, device, gib
from mqo.scale.memory import CONTEXT
from mqo.simulate.facts import RankFacts, Work
from mqo.simulate.lines import MEANINGS, answers, heading
from mqo.simulate.result import UNSEEN, Simulation
from mqo.simulate.roofline import seconds, wire_seconds

LINES = 40  # of source
# {kind of memory: (color on a light page, color on a dark page)}
COLORS = {
    "weights": ("#1f5fa8", "#7db4f0"),
    "gradients": ("#0f7d6e", "#5fd0bd"),
    "optimizer": ("#6a8a00", "#b7d64b"),
    "activations": ("#c46a00", "#f5b25c"),
    "logits": ("#b3261e", "#f28b82"),
    "quantizer": ("#8a3fc0", "#c592ff"),
    "temporary": ("#59626d", "#a3adb9"),
}


def page(found: Simulation) -> str:
    """Return the HTML; SetupError without plotly."""
    environment = templates("mqo.simulate", "mqo.report")
    environment.filters |= {"gib": gib}
    rank = found.worst
    return environment.get_template("page.html.j2").render(
        found=found,
        heading=heading(found),
        answers=answers(found),
        rank=rank,
        stages=[_stage(one) for one in found.ranks],
        kinds=[(kind, size, MEANINGS[kind]) for kind, size in rank.kinds.items()],
        colors=COLORS,
        alive=rank.at_peak[:LINES],
        products=_products(found),
        exchanges=_exchanges(found),
        bound=found.roofline(found.slowest),
        reserve=CONTEXT,
        unseen=UNSEEN,
        device=device(found.device),
        data=as_script({"stages": [_curves(one) for one in found.ranks], "room": _room(found)}),
        plotly=packed(plotly_source()),
    )


def _room(found: Simulation) -> float:
    """Return the GiB available for tensors."""
    return (found.room - CONTEXT) / GIB


def _stage(rank: RankFacts) -> str:
    return f"rank {rank.rank}" + (
        f", stage {rank.stage} of {rank.stages}" if rank.stages > 1 else ""
    )


def _curves(rank: RankFacts) -> dict[str, Any]:
    """Return the GiB of each kind over a step."""
    line = rank.timeline
    curves = [
        {
            "name": kind,
            "light": COLORS[kind][0],
            "dark": COLORS[kind][1],
            "y": [round(size / GIB, 4) for size in line[kind]],
        }
        for kind in COLORS
        if any(line[kind])
    ]
    return {"name": _stage(rank), "x": line["operation"], "curves": curves}


def _products(found: Simulation) -> Sequence[tuple[Work, float, float, float]]:
    """Return each product with its calls, TFLOPs and seconds in a step, slowest first."""
    on = device(found.device)
    rows = [
        (work, calls, work.flops * calls / 1e12, seconds(work, on) * calls)
        for work, calls in found.slowest.works().items()
        if work.flops
    ]
    return sorted(rows, key=lambda row: -row[3])


def _exchanges(found: Simulation) -> list[dict[str, Any]]:
    """Return exchanges, summed over groups of equal kind and size, slowest first."""
    on, rows = device(found.device), dict[tuple, dict[str, float]]()
    for one, calls in found.slowest.exchanges().items():
        key = (one.group, one.operation, one.ranks, one.nodes)
        row = rows.setdefault(key, {"calls": 0.0, "gigabytes": 0.0, "seconds": 0.0})
        row["calls"] += calls
        row["gigabytes"] += one.wire * calls / 1e9
        row["seconds"] += wire_seconds(one, on) * calls
    named = ("group", "operation", "ranks", "nodes")
    made = [dict(zip(named, key, strict=True)) | row for key, row in rows.items()]
    return sorted(made, key=lambda row: -row["seconds"])
