"""The report's page: one file that needs no other file and no network."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mqo.extras import package
from mqo.report.collect import LeftOut, Run
from mqo.report.colors import SYMBOLS, Look, legend
from mqo.report.compare import MOST_SHOWN, Group
from mqo.report.curves import MOST, Curve, first, of_group
from mqo.report.evidence import Evidence, Spread
from mqo.report.operands import QUANTITIES, Map, maps, ranges
from mqo.report.operands import shown as measure
from mqo.report.rows import Row, quantized
from mqo.report.series import DIFFERENCES, POINTS, Band, steps_a_point
from mqo.report.tables import sites

if TYPE_CHECKING:
    from jinja2 import Environment

NOTHING, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"
PACKAGES = ("torch", "numpy", "numba", "triton", "transformers", "tokenizers")


def templates(*packages: str) -> Environment:
    """Return the Jinja environment that loads the templates of these packages."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=ChoiceLoader([PackageLoader(package, ".") for package in packages]),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page(groups: Sequence[Group], left_out: Sequence[LeftOut], when: str) -> str:
    """Return the report as one HTML file.

    `left_out` are runs that no group has, with reasons. `when` is the printed date.

    Raises:
        SetupError: plotly is not installed.
    """
    environment = templates("mqo.report")
    environment.globals |= {
        "quantized": quantized,
        "legend": legend,
        "QUANTITIES": QUANTITIES,
        "measure": measure,
        "sites": sites,
        "SYMBOLS": SYMBOLS,
        "MOST": MOST,
        "MOST_SHOWN": MOST_SHOWN,
        "means": _means,
        "points": {"loss": POINTS, "difference": DIFFERENCES},
        "packages": PACKAGES,
    }
    environment.filters |= {"percent": percent, "number": number, "bytes": size}
    environment.filters |= {"shown": shown, "unseen": unseen, "memory": memory}
    runs = [run for group in groups for run in group.runs]
    diffs = Diffs(runs)
    curves = [{curve.name: curve for curve in of_group(group)} for group in groups]
    drawn = list(map(_drawn, groups, curves))
    operands = [_operands(group) for group in groups]
    data = {"groups": drawn, "most": MOST, "diffs": diffs.listed}
    return environment.get_template("page.html.j2").render(
        groups=groups,
        curves=curves,
        shown=[group["shown"] for group in drawn],
        operands=operands,
        maps=packed(json.dumps(operands)),
        left_out=left_out,
        when=when,
        runs=runs,
        machines=list(dict.fromkeys(run.machine.line() for run in runs)),
        diffs=diffs,
        data=as_script(data),
        plotly=packed(plotly_source()),
        parts=packed(json.dumps(diffs.parts)),
    )


class Diffs:
    """The overlay.diff of each run, without duplicates: `parts` by hash, `listed` by run."""

    def __init__(self, runs: Sequence[Run]) -> None:
        diffs = list(dict.fromkeys(run.changes for run in runs))
        names = ("path", "kind", "added", "removed", "digest")
        self.listed = [[{name: getattr(part, name) for name in names} for part in d] for d in diffs]
        self.parts = {part.digest: part.text for diff in diffs for part in diff}
        self.number_of = {diff: number for number, diff in enumerate(diffs)}

    def number(self, run: Run) -> int:
        """Return the index in `listed` of a run's diff."""
        return self.number_of[run.changes]

    def summary(self, run: Run) -> str:
        """Return the number of files and lines."""
        rows = self.listed[self.number(run)]
        added, removed = (sum(row[name] for row in rows) for name in ("added", "removed"))
        return f"{len(rows)} files, +{added:,} -{removed:,} lines"


# -- curves ---------------------------------------------------------------------------------------


def _drawn(group: Group, curves: Mapping[str, Curve]) -> dict[str, Any]:
    gaps = [_gap(row, row.gap, curves[row.variant].look) for row in group.forest if row.gap]
    return {"curves": list(map(_curve, curves.values())), "gaps": gaps, "shown": first(group)} | {
        "baseline": group.baseline_variant
    }


def _gap(row: Row, gap: Evidence, look: Look) -> dict[str, Any]:
    """Return the data of a variant in the forest plot."""
    values = {name: getattr(gap, name) for name in ("mean", "low", "high")}
    finite = {name: None if x is None or not math.isfinite(x) else x for name, x in values.items()}
    return {"variant": row.variant, "label": row.label, "look": _look(look)} | finite


def _means(group: Group, points: int) -> str:
    """Return the text ", means of N steps" if a point of the longest curve averages N > 1."""
    each = steps_a_point(max(len(run.train) for run in group.runs), points)
    return f", means of {each} steps" if each > 1 else ""


def _curve(curve: Curve) -> dict[str, Any]:
    return {
        "variant": curve.name,
        "label": curve.label,
        "look": _look(curve.look),
        "loss": _points(curve.loss),
        "difference": _points(curve.difference),
        "valid": _points(curve.valid),
    }


def _look(look: Look) -> dict[str, str]:
    return asdict(look) | {"symbol": look.symbol.plotly}


def _points(band: Band) -> dict[str, list]:
    """Return {x: steps, y: means}, and the range if there is one; None for what is not finite."""
    points: dict[str, list] = {"x": list(band.steps), "y": _values(band.mean)}
    several = band.low != band.high
    return points | ({"low": _values(band.low), "high": _values(band.high)} if several else {})


def _values(values: Sequence[float], digits: int = 7) -> list[float | None]:
    return [float(f"{value:.{digits}g}") if math.isfinite(value) else None for value in values]


def _operands(group: Group) -> dict[str, Any]:
    """Return each variant's maps, for all seeds, and the range of each quantity in all of them."""
    by_variant = {row.variant: maps(run.quantizers for run in row.runs) for row in group.rows}
    return {
        "ranges": ranges(grid for these in by_variant.values() for grid in these),
        "maps": {name: list(map(_map, these)) for name, these in by_variant.items() if these},
    }


def _map(grid: Map) -> dict[str, Any]:
    values = [_values(row, 4) for row in grid.values]
    quantity = QUANTITIES[grid.quantity]
    about = {"title": f"{grid.operand} {quantity.title}", "quantity": grid.quantity}
    about["unit"] = quantity.unit
    return about | {"x": grid.steps, "y": grid.rows, "z": values}


# -- embedded data --------------------------------------------------------------------------------


def plotly_source() -> str:
    """Return plotly.js. SetupError without plotly."""
    return package("plotly.offline").get_plotlyjs()


def packed(text: str) -> str:
    """Compress text for the page's script: plotly shrinks to a third, diffs to a quarter."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode("ascii")


def as_script(data: Mapping[str, Any]) -> str:
    """Return JSON that cannot end a script element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


# -- numbers --------------------------------------------------------------------------------------


def number(spread: Spread | None, form: str = ".4f", scale: float = 1) -> str:
    """Return the mean, and the deviation of several values."""
    if spread is None:
        return NOTHING
    if not math.isfinite(spread.mean):
        return "not finite"
    more = "" if spread.deviation is None else f" ± {spread.deviation * scale:{form.lstrip('+')}}"
    return f"{spread.mean * scale:{form}}{more}".replace("-", MINUS)


def shown(gap: Evidence | None, digits: int = 2) -> str:
    """Return a relative difference in percent, with the interval of its mean if it has one."""
    if gap is None:
        return NOTHING
    if not math.isfinite(gap.mean):
        return "not finite"
    text = f"{100 * gap.mean:+.{digits}f}%"
    if gap.low is not None and gap.high is not None:
        text += f" [{100 * gap.low:+.{digits}f}, {100 * gap.high:+.{digits}f}]"
    return text.replace("-", MINUS)


def memory(saved: Evidence | None) -> str:
    """Return a relative saving of memory as percent less or more, with its interval."""
    if saved is None:
        return NOTHING
    if not math.isfinite(saved.mean):
        return "not finite"
    if saved.low is None or saved.high is None:
        return _less(saved.mean)
    ends = sorted((saved.low, saved.high), key=abs)
    if saved.low < 0 < saved.high:
        return f"{_less(saved.mean)} [{_less(saved.high)}, {_less(saved.low)}]"
    return f"{_less(saved.mean)} [{', '.join(f'{100 * abs(end):.1f}' for end in ends)}]"


def _less(saved: float) -> str:
    amount = f"{100 * abs(saved):.1f}"
    return f"{amount}% {'less' if saved > 0 else 'more'}" if float(amount) else "0.0%"


def unseen(gap: Evidence | None, digits: int = 2) -> str:
    """Return a note for a gap that was not seen; '' for other gaps."""
    if gap is None or gap.seen is not False or gap.smallest is None:
        return ""
    count = len(gap.values)
    words = f"no difference seen{gap.correction}"
    return f"{words}; {count} seeds would detect {gap.smallest:.{digits}%}"


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share, in percent."""
    return NOTHING if share is None else f"{share:.{digits}%}"


def size(spread: Spread | None) -> str:
    """Return bytes as GiB, or as MiB below 1 GiB."""
    if spread is None:
        return NOTHING
    unit, scale = ("GiB", 2**30) if spread.mean >= 2**30 else ("MiB", 2**20)
    return f"{number(spread, '.2f' if unit == 'GiB' else '.0f', 1 / scale)} {unit}"
