"""The shape of a curve's points, by which variants of one look are told apart."""

from __future__ import annotations

from dataclasses import dataclass

from mqo.report.colours import MARKERS, look
from mqo.report.compare import Group


@dataclass(frozen=True)
class Symbol:
    """A shape by plotly's name, by matplotlib's, and as a letter."""

    plotly: str
    matplotlib: str
    letter: str


SYMBOLS = (
    Symbol("circle", MARKERS[0], "●"),
    Symbol("square", MARKERS[1], "■"),
    Symbol("diamond", MARKERS[2], "◆"),
    Symbol("triangle-up", MARKERS[3], "▲"),
    Symbol("x", MARKERS[4], "✖"),
)


def symbol(group: Group, variant: str) -> Symbol:
    """The first one, but for further variants of one look."""
    looks = {row.variant: look(row.types) for row in group.rows}
    alike = [name for name, one in looks.items() if one == looks[variant]]
    return SYMBOLS[alike.index(variant) % len(SYMBOLS)]
