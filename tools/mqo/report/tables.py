"""The report's tables as plain rows, for CSV and JSON; None for values that were not measured."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mqo.megatron.run.files import jsonable
from mqo.report.collect import LeftOut, Site
from mqo.report.compare import Group
from mqo.report.evidence import Evidence, Spread
from mqo.report.rows import PAIRED, Row, final_loss, quantized

VALUES = ("loss", "gap", "tokens_per_s", "step_time", "peak_memory", "memory_saved", "speed_up")
Table = list[dict[str, Any]]


def tables(groups: Sequence[Group], left_out: Sequence[LeftOut]) -> dict[str, Table]:
    """Return {name of the table: rows}."""
    return {
        "results": [_result(group, row) for group in groups for row in group.rows],
        "sites": [
            _names(group, row) | site
            for group in groups
            for row in group.rows
            for site in sites(row)
        ],
        "verdicts": [_verdict(group) for group in groups],
        "runs": [_run(group, run) for group in groups for run in group.runs],
        "left_out": [vars(run) for run in left_out],
    }


def write(folder: Path, tables: Mapping[str, Table]) -> None:
    """Write one CSV file per table with rows, and report.json with all tables."""
    for name, rows in ((name, rows) for name, rows in tables.items() if rows):
        columns = list(dict.fromkeys(key for row in rows for key in row))
        with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    text = json.dumps({"schema": 1} | jsonable(dict(tables)), indent=1, allow_nan=False)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")


def sites(row: Row) -> Table:
    """Return the measurements of a variant's quantizers by site and type, averaged over runs."""
    by_type: dict[tuple[str, str], list[Site]] = {}
    for site in (site for run in row.runs for site in run.sites):
        by_type.setdefault((site.site, site.quant_type), []).append(site)
    return [
        {
            "site": site,
            "type": kind,
            "layers": rows[0].layers,
            "calls": sum(measured.calls for measured in rows),
            "sqnr_db": _mean(Spread.over(measured.sqnr_db for measured in rows)),
            "underflow": _mean(Spread.over(measured.underflow for measured in rows)),
        }
        for (site, kind), rows in by_type.items()
    ]


def _names(group: Group, row: Row) -> dict[str, Any]:
    names = {name: getattr(group.first, name) for name in ("model", "dataset", "config")}
    return names | {"differs": "; ".join(group.differs), "mode": row.variant}


def _result(group: Group, row: Row) -> dict[str, Any]:
    kind = "validation" if group.validated else "training"
    cells = {
        "quantized": quantized(row.types, row.runs[0].differing),
        "seeds": len(row.runs),
        "loss_kind": kind,
    }
    for name in VALUES:
        spread: Spread | None = getattr(row, name)
        cells |= {name: _mean(spread), f"{name}_deviation": spread and spread.deviation}
    for name in PAIRED:
        cells |= _evidence(name, getattr(row, name))
    return _names(group, row) | cells | {"quantized_share": row.share}


def _evidence(name: str, evidence: Evidence | None) -> dict[str, Any]:
    """Return the interval of a mean, and for the gap also the other statistics."""
    low, high = (evidence.low, evidence.high) if evidence else (None, None)
    cells: dict[str, Any] = {f"{name}_low": low, f"{name}_high": high}
    if name != "gap":
        return cells
    again = (evidence and evidence.bootstrap) or (None, None)
    cells |= {"gap_bootstrap_low": again[0], "gap_bootstrap_high": again[1]}
    names = {"gap_p": "p", "gap_p_holm": "adjusted", "gap_smallest": "smallest"}
    return cells | {ours: getattr(evidence, theirs, None) for ours, theirs in names.items()}


def _verdict(group: Group) -> dict[str, Any]:
    verdict = group.verdict
    return {
        "group": group.full_title,
        "differs": "; ".join(group.differs),
        "choice": verdict.choice,
        "firm": not verdict.doubts,
        "tolerance": verdict.tolerance,
        "reasons": " ".join(verdict.reasons),
        "doubts": " ".join(verdict.doubts),
    }


def _run(group: Group, run: Any) -> dict[str, Any]:
    names = ("name", "variant", "seed", "steps", "commit", "upstream", "python", "peak_memory")
    cells = {name: getattr(run, name) for name in (*names, "step_time", "tokens_per_s")}
    cells["loss"] = final_loss(run, group.validated)
    torch = run.packages.get("torch")
    return {"group": group.full_title} | cells | {"torch": torch, "machine": run.machine.line()}


def _mean(spread: Spread | None) -> float | None:
    return spread.mean if spread else None
