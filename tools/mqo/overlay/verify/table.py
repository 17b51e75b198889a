"""The table of `mqo verify`: one row per entry, one column per release."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mqo.overlay.verify.release import Verified

# Short names of the outcomes, for tables of many releases.
SHORT = {
    "applied": "yes",
    "not needed": "-",
    "drifted": "LOST",
    "not tried": "?",
    "compiled only": "comp",
    "failed": "FAIL",
}


def exit_code(results: Sequence[Verified]) -> int:
    """Return 0 if all are green, 1 if one is not, 2 if one could not be tried."""
    if any(result.error for result in results):
        return 2
    return 0 if all(result.green for result in results) else 1


# -- the table --------------------------------------------------------------------------------


def table_lines(results: Sequence[Verified]) -> list[str]:
    """Return lines for 80 columns: the table, the verdict, and the notes."""
    rows = [["", *_heads([result.version for result in results])]]
    for number, entry in enumerate(results[0].entries):
        rows.append([entry.name, *(result.entries[number].outcome for result in results)])
    rows.append(["forward pass", *(result.forward for result in results)])
    rows = [[SHORT.get(cell, cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    red = [result.version for result in results if not result.green]
    verdict = f"NOT green: {', '.join(red)}" if red else "all green"
    return [*table, verdict, *(f"{r.version}: {n}" for r in results for n in _notes(r))]


def _heads(versions: Sequence[str]) -> list[str]:
    """Return the versions without their last number, if they remain distinct."""
    short = [version.rpartition(".")[0] or version for version in versions]
    return short if len(set(short)) == len(versions) else list(versions)


def _notes(result: Verified) -> Iterable[str]:
    if result.error:
        yield result.error
    for entry in result.entries:
        if entry.why:
            yield f"{entry.name} drifted: {entry.why}"
    if result.lacks:
        yield f"compiled only: needs {result.lacks}, which is not installed"
    yield from result.faults
