"""A comparison as lines for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mqo.report.compare import Group

WIDTH, MOST_OF_LABEL = 80, 27  # columns of a line, and of a mode's name in it


def summary(group: Group) -> Iterator[str]:
    """Yield a comparison for the terminal, in lines of at most WIDTH columns.

    First the differences to other comparisons, then each mode's gap, then the rule's choice.
    """
    from mqo.report.page import shown, unseen

    count, longest = len(group.runs), max(len(row.label) for row in group.rows)
    width = min(longest, MOST_OF_LABEL)
    yield from wrapped(f"{group.title}: {count} run{'s' * (count > 1)}", "")
    if group.subtitle:
        yield from wrapped(f"only here: {group.subtitle}")
    base = group.reference
    if base != "unquantized":
        yield from wrapped(f"baseline: {base}")
        base = "the baseline"
    yield f"  {'':{width}}  seeds    loss  gap to {base} [95 % interval]"
    for row in group.rows:
        yield from gap_row(row.label, width, len(row.runs), row.loss.mean, shown(row.gap))
        if words := unseen(row.gap):
            yield from wrapped(words, " " * (width + 4))
    verdict = group.verdict
    if verdict.choice:
        rule = f"By the rule of docs/report.md, with T = {verdict.tolerance:.2%}"
        firm = "." if not verdict.doubts else ", but the evidence does not separate the modes:"
        yield from wrapped(f"{rule}, take {group.choice}{firm}")
    for text in verdict.doubts:
        yield from wrapped(text)


def gap_row(label: str, width: int, seeds: int, loss: float, gap: str) -> Iterator[str]:
    """Yield a row of a table of gaps: a label, the number of seeds, the loss and the gap."""
    if len(label) > width:
        yield from wrapped(label)
        label = ""
    line = f"  {label:{width}}  {seeds:5}  {loss:.4f}"
    if len(line) + len(gap) + 2 > WIDTH:  # a run that diverged
        yield line
        line = " " * (width + 2)
    yield f"{line}  {gap}".rstrip()


def wrapped(text: str, indent: str = "  ") -> list[str]:
    """Return a text in lines of at most WIDTH columns; those after the first are indented more."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )
