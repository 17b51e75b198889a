"""The table of `mqo verify`: a row a release, a column an entry, and what is to be said below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mqo.overlay.verify import Verified


def lines(results: Sequence[Verified]) -> list[str]:
    """Lines for a terminal: one row a release, then everything that is to be said about it."""
    head = ["release", *(entry.name for entry in results[0].entries), "forward", "green"]
    rows = [head, *(_row(result) for result in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return table + [f"{r.version}: {note}" for r in results for note in _notes(r)]


def _row(result: Verified) -> list[str]:
    cells = [f"{e.outcome} {e.files}" if e.files else e.outcome for e in result.entries]
    verdict = "error" if result.error else "yes" if result.green else "NO"
    return [result.version, *cells, result.forward, verdict]


def _notes(result: Verified) -> Iterable[str]:
    if result.error:
        yield result.error
    for entry in result.entries:
        if entry.why:
            yield f"{entry.name} drifted: {entry.why}"
    if result.lacks:
        yield f"compiled only: needs {result.lacks}, which is not installed"
    yield from result.faults
