"""Render the page of a simulation: one file that needs no other and no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mqo.megatron.simulation.rows import Work
from mqo.report.page import as_script, packed, plotly_source, templates
from mqo.scale.devices import GIB, device, gib
from mqo.scale.memory import CONTEXT
from mqo.simulate.facts import RankFacts
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


def page(simulation: Simulation) -> str:
    """Return the HTML; SetupError without plotly."""
    environment = templates("mqo.simulate", "mqo.report")
    environment.filters |= {"gib": gib}
    rank = simulation.worst
    return environment.get_template("page.html.j2").render(
        simulation=simulation,
        heading=heading(simulation),
        answers=answers(simulation),
        rank=rank,
        stages=[_stage(facts) for facts in simulation.ranks],
        kinds=[(kind, size, MEANINGS[kind]) for kind, size in rank.kinds.items()],
        colors=COLORS,
        alive=rank.at_peak[:LINES],
        products=_products(simulation),
        exchanges=_exchanges(simulation),
        bound=simulation.roofline(simulation.slowest),
        reserve=CONTEXT,
        unseen=UNSEEN,
        device=device(simulation.device),
        data=as_script(
            {"stages": [_curves(facts) for facts in simulation.ranks], "room": _room(simulation)}
        ),
        plotly=packed(plotly_source()),
    )


def _room(simulation: Simulation) -> float:
    """Return the GiB available for tensors."""
    return (simulation.room - CONTEXT) / GIB


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


def _products(simulation: Simulation) -> Sequence[tuple[Work, float, float, float]]:
    """Return each product with its calls, TFLOPs and seconds in a step, slowest first."""
    on = device(simulation.device)
    rows = [
        (work, calls, work.flops * calls / 1e12, seconds(work, on) * calls)
        for work, calls in simulation.slowest.works().items()
        if work.flops
    ]
    return sorted(rows, key=lambda row: -row[3])


def _exchanges(simulation: Simulation) -> list[dict[str, Any]]:
    """Return exchanges, summed over groups of equal kind and size, slowest first."""
    on, rows = device(simulation.device), dict[tuple, dict[str, float]]()
    for exchange, calls in simulation.slowest.exchanges().items():
        key = (exchange.group, exchange.operation, exchange.ranks, exchange.nodes)
        row = rows.setdefault(key, {"calls": 0.0, "gigabytes": 0.0, "seconds": 0.0})
        row["calls"] += calls
        row["gigabytes"] += exchange.wire * calls / 1e9
        row["seconds"] += wire_seconds(exchange, on) * calls
    named = ("group", "operation", "ranks", "nodes")
    table = [dict(zip(named, key, strict=True)) | row for key, row in rows.items()]
    return sorted(table, key=lambda row: -row["seconds"])
