"""The table of `mqo verify`: a row an entry, a column a release, and what is to be said below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mqo.overlay.verify.release import Verified

# The outcomes in few letters, for a series of many releases.
SHORT = {
    "applied": "yes",
    "not needed": "-",
    "drifted": "LOST",
    "not tried": "?",
    "compiled only": "comp",
    "failed": "FAIL",
}


def lines(results: Sequence[Verified]) -> list[str]:
    """Lines for a terminal of 80 columns: the table, the verdict, and what there is to say."""
    rows = [["", *_heads([result.version for result in results])]]
    for place, entry in enumerate(results[0].entries):
        rows.append([entry.name, *(_short(r.entries[place].outcome) for r in results)])
    rows.append(["forward pass", *(_short(result.forward) for result in results)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [*table, _verdict(results), *(f"{r.version}: {n}" for r in results for n in _notes(r))]


def _heads(versions: Sequence[str]) -> list[str]:
    """The versions without their last number, where that tells them apart."""
    short = [version.rpartition(".")[0] or version for version in versions]
    return short if len(set(short)) == len(versions) else list(versions)


def _short(outcome: str) -> str:
    return SHORT.get(outcome, outcome)


def _verdict(results: Sequence[Verified]) -> str:
    red = [result.version for result in results if not result.green]
    return f"NOT green: {', '.join(red)}" if red else "all green"


def _notes(result: Verified) -> Iterable[str]:
    if result.error:
        yield result.error
    for entry in result.entries:
        if entry.why:
            yield f"{entry.name} drifted: {entry.why}"
    if result.lacks:
        yield f"compiled only: needs {result.lacks}, which is not installed"
    yield from result.faults
