"""Render the page of a performance test: one file, without scripts and network."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mqo.perf.sections import Section, outcomes
from mqo.report.collect import Run
from mqo.report.looks import looks
from mqo.report.page import MINUS, NOTHING, PACKAGES, templates
from mqo.report.series import downsample
from mqo.runs import Series

WIDTH, HEIGHT = 640, 220  # of the plot
WORDS = {"pass": "✔ pass", "fail": "✘ fail", "not judged": "○ not judged"}


def page(facts: Mapping[str, Any], sections: Sequence[Section], runs: Mapping[str, Run]) -> str:
    """Return the HTML; `facts` is the content of perf.json."""
    environment = templates("mqo.perf", "mqo.report")
    environment.filters |= {"shown": shown}
    environment.globals |= {"words": WORDS, "packages": PACKAGES}
    pair = [runs[name] for name in ("baseline", "mode")]
    known = looks((run.variant, run.types) for run in pair)
    return environment.get_template("perf.html.j2").render(
        facts=facts,
        sections=sections,
        verdicts=outcomes(sections),
        run=runs["mode"],
        curves=curves([run.train for run in pair]),
        looks=list(zip([run.label for run in pair], known, strict=True)),
        size=(WIDTH, HEIGHT),
    )


def shown(value: Any) -> str:
    """Return the text of a table cell: four digits, commas in thousands, a dash for None."""
    if value is None:
        return NOTHING
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        text = f"{value:,}"
    elif not math.isfinite(value):
        return "∞" if value == math.inf else "not finite"
    elif value and not 1e-3 <= abs(value) < 1e7:
        text = f"{value:.2e}"
    else:
        text = f"{value:,.{max(0, 3 - math.floor(math.log10(abs(value))))}f}" if value else "0"
    return text.replace("-", MINUS)


def curves(losses: Sequence[Series]) -> list[str]:
    """Return the points of a polyline per series, on one scale; [] if one has under 2 points."""
    thinned = [[(x, y) for x, y in downsample(series) if math.isfinite(y)] for series in losses]
    if any(len(series) < 2 for series in thinned):
        return []
    xs, ys = zip(*(point for series in thinned for point in series), strict=True)
    across, up = (max(xs) - min(xs)) or 1, (max(ys) - min(ys)) or 1
    return [
        " ".join(
            f"{WIDTH * (x - min(xs)) / across:.1f},{HEIGHT * (max(ys) - y) / up:.1f}"
            for x, y in series
        )
        for series in thinned
    ]
