"""The table of `mqo verify`: a row a release, a column an entry, and what is to be said below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mqo.overlay.verify.release import Verified

# The usual outcomes in few letters, for a series of many entries.
SHORT = {"applied": "yes", "not needed": "-"}


def lines(results: Sequence[Verified]) -> list[str]:
    """Lines for a terminal of 80 columns: a row a release, the verdict, and what there is to say.

    Names stand over their columns in pieces, one below the other.
    """
    names = ["release", *(entry.name for entry in results[0].entries), "forward"]
    rows = [*_head(names), *map(_row, results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [*table, _verdict(results), *(f"{r.version}: {n}" for r in results for n in _notes(r))]


def _head(names: Sequence[str]) -> list[list[str]]:
    pieces = [name.split("_") for name in names]
    height = max(map(len, pieces))
    return [list(row) for row in zip(*([""] * (height - len(p)) + p for p in pieces), strict=True)]


def _row(result: Verified) -> list[str]:
    forward = result.forward.removesuffix(" only")
    return [result.version, *(SHORT.get(e.outcome, e.outcome) for e in result.entries), forward]


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
