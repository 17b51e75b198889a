"""The report's page: one file that needs no other, and no network."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mqo.report.collect import FileChange, LeftOut, Run
from mqo.report.colors import SYMBOLS, look, symbol
from mqo.report.compare import BASELINE, Group, Row, Spread, difference, quantized
from mqo.report.downsample import DIFFERENCES, POINTS, downsample, steps_a_point
from mqo.report.evidence import Evidence
from mqo.report.extra import package
from mqo.report.tables import sites
from mqo.runs import Series

if TYPE_CHECKING:
    from jinja2 import Environment

NOTHING, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"
PACKAGES = ("torch", "numpy", "numba", "triton", "transformers", "tokenizers")


def templates(*packages: str) -> Environment:
    """What renders the pages that lie in these packages; each of them may include the others'."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=ChoiceLoader([PackageLoader(package, ".") for package in packages]),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def page(groups: Sequence[Group], left_out: Sequence[LeftOut], when: str) -> str:
    """The HTML. SetupError without plotly."""
    environment = templates("mqo.report")
    environment.globals |= {
        "BASELINE": BASELINE,
        "quantized": quantized,
        "look": look,
        "sites": sites,
        "symbol": symbol,
        "SYMBOLS": SYMBOLS,
        "means": _means,
        "points": {"loss": POINTS, "difference": DIFFERENCES},
        "packages": PACKAGES,
    }
    environment.filters |= {"percent": percent, "number": number, "bytes": size}
    environment.filters |= {"shown": shown, "unseen": unseen}
    runs = [run for group in groups for run in group.runs]
    diffs = Diffs(runs)
    data = {"groups": [_curves(group) for group in groups], "diffs": diffs.listed}
    return environment.get_template("page.html.j2").render(
        groups=groups,
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
    """The runs' overlay.diff: each file's part once, and each list of parts once."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.parts: dict[str, str] = {}
        self.listed: list[list[dict[str, Any]]] = []
        for run in runs:
            rows = [_listed(change) for change in run.changes]
            self.parts |= {change.digest: change.text for change in run.changes}
            if rows not in self.listed:
                self.listed.append(rows)

    def number(self, run: Run) -> int:
        """The place of the run's diff in `listed`."""
        return self.listed.index([_listed(change) for change in run.changes])

    def summary(self, run: Run) -> str:
        """How many files and lines."""
        rows = self.listed[self.number(run)]
        added, removed = (sum(row[name] for row in rows) for name in ("added", "removed"))
        return f"{len(rows)} files, +{added:,} -{removed:,} lines"


def _listed(change: FileChange) -> dict[str, Any]:
    names = ("path", "kind", "added", "removed", "digest")
    return {name: getattr(change, name) for name in names}


# -- curves ---------------------------------------------------------------------------------------


def _curves(group: Group) -> dict[str, Any]:
    gaps = [_gap(row, found) for row in group.forest if (found := row.evidence["gap"])]
    return {"series": [_series(group, run) for run in group.runs], "gaps": gaps}


def _gap(row: Row, found: Evidence) -> dict[str, Any]:
    """Return what the forest plot shows of a variant."""
    values = {name: getattr(found, name) for name in ("mean", "low", "high")}
    finite = {name: None if x is None or not math.isfinite(x) else x for name, x in values.items()}
    return {"variant": row.variant, "label": row.label, "look": asdict(look(row.types))} | finite


def _means(group: Group, points: int) -> str:
    """What a point of the longest curve is, where that is not a step."""
    each = steps_a_point(max(len(run.train) for run in group.runs), points)
    return f", means of {each} steps" if each > 1 else ""


def _series(group: Group, run: Run) -> dict[str, Any]:
    base = group.baseline(run)
    other = difference(run, base) if base and base is not run else []
    several = len(group.seeds) > 1
    return {
        "variant": run.variant,
        "label": f"{run.label}, seed {run.seed}" if several else run.label,
        "look": asdict(look(run.types)),
        "symbol": symbol(group, run.variant).plotly,
        "loss": _points(downsample(run.train)),
        "difference": _points(downsample(other, DIFFERENCES)),
        "valid": _points(downsample(run.valid)),
    }


def _points(series: Series) -> dict[str, list]:
    """{x: steps, y: values}; None for what is not finite, which plots leave open."""
    values = [float(f"{value:.7g}") if math.isfinite(value) else None for _, value in series]
    return {"x": [step for step, _ in series], "y": values}


# -- what the page carries ------------------------------------------------------------------------


def plotly_source() -> str:
    """Return plotly.js. SetupError without plotly."""
    return package("plotly.offline").get_plotlyjs()


def packed(text: str) -> str:
    """For the page's own script to unpack: plotly takes a third so, the diffs a quarter."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode("ascii")


def as_script(data: Mapping[str, Any]) -> str:
    """JSON that ends no script element."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


# -- numbers --------------------------------------------------------------------------------------


def number(spread: Spread | None, form: str = ".4f", scale: float = 1) -> str:
    """The mean, and its deviation where there are several."""
    if spread is None:
        return NOTHING
    if not math.isfinite(spread.mean):
        return "not finite"
    more = "" if spread.deviation is None else f" ± {spread.deviation * scale:{form.lstrip('+')}}"
    return f"{spread.mean * scale:{form}}{more}".replace("-", MINUS)


def shown(found: Evidence | None, digits: int = 2) -> str:
    """A relative difference in percent, and the interval of its mean where there is one."""
    if found is None:
        return NOTHING
    if not math.isfinite(found.mean):
        return "not finite"
    text = f"{100 * found.mean:+.{digits}f}%"
    if found.low is not None and found.high is not None:
        text += f" [{100 * found.low:+.{digits}f}, {100 * found.high:+.{digits}f}]"
    return text.replace("-", MINUS)


def unseen(found: Evidence | None, digits: int = 2) -> str:
    """What to say of a difference that was not seen; nothing of others."""
    if found is None or found.seen is not False or found.smallest is None:
        return ""
    count = len(found.values)
    return f"no difference seen; {count} seeds would show {found.smallest:.{digits}%}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share, in percent."""
    return NOTHING if share is None else f"{share:.{digits}%}"


def size(spread: Spread | None) -> str:
    """Bytes as GiB, or MiB below one."""
    if spread is None:
        return NOTHING
    unit, scale = ("GiB", 2**30) if spread.mean >= 2**30 else ("MiB", 2**20)
    return f"{number(spread, '.2f' if unit == 'GiB' else '.0f', 1 / scale)} {unit}"
