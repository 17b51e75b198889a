"""The look of a mode, the same in every plot: its color shows the format, its dash the sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mqo.matrix.tables import ATTENTION_SITES
from mqo.quant import formats
from mqo.quant.plugins import Plugin

# Colors of families other than formats: a name, and the colors on light and dark pages.
_OTHERS = {
    "none": ("black, on dark pages white", "#1c2127", "#e9edf2"),
    "mixed": ("purple", Plugin.light, "#c592ff"),  # also custom quantizers
}
# (quantized linear layers, QK, PV) -> plotly's name of the dash.
_DASHES = {
    (False, False, False): "solid",
    (False, True, False): "dot",
    (True, False, False): "dash",
    (True, True, False): "solid",
    (True, True, True): "longdashdot",
}
_OTHER = "dashdot"
# plotly's name of a dash -> matplotlib's, and its meaning for a quantized run.
DASHES: dict[str, tuple[Any, str]] = {
    "dash": ("--", "linear layers dashed"),
    "dot": (":", "QK dotted"),
    "solid": ("-", "linear layers and QK solid"),
    "longdashdot": ((0, (8, 2, 1, 2)), "linear layers, QK and PV with long dashes and dots"),
    "dashdot": ("-.", "other sites with dashes and dots"),
}


@dataclass(frozen=True)
class Color:
    """A color's name, for readers who do not see it, and the color on light and dark pages.

    A test checks that each has a contrast of at least 3:1 with its page.
    """

    name: str
    light: str
    dark: str


def colors() -> dict[str, Color]:
    """Return {family: color}: the colors of formats are in formats.toml, or the user's."""
    rows = formats.FORMATS.items()
    named = {name: Color(row.color, row.light, row.dark) for name, row in rows}
    return named | {name: Color(*color) for name, color in _OTHERS.items()}


@dataclass(frozen=True)
class Symbol:
    """The shape of a curve's points: plotly's name, matplotlib's name, and a letter."""

    plotly: str
    matplotlib: str
    letter: str


SYMBOLS = (
    Symbol("circle", "o", "●"),
    Symbol("square", "s", "■"),
    Symbol("diamond", "D", "◆"),
    Symbol("triangle-up", "^", "▲"),
    Symbol("x", "X", "✖"),
    Symbol("triangle-down", "v", "▼"),
    Symbol("cross", "P", "✚"),
    Symbol("star", "*", "★"),
    Symbol("triangle-left", "<", "◀"),
    Symbol("pentagon", "p", "⬟"),
    Symbol("triangle-right", ">", "▶"),
)


@dataclass(frozen=True)
class Look:
    """Colors as #rrggbb, a dash that plotly knows, and a marker."""

    light: str
    dark: str
    dash: str
    symbol: Symbol = SYMBOLS[0]


def family(types: Mapping[str, str]) -> str:
    """Return the color family of a run with these types: a format, 'mixed', or 'none'."""
    name = _name(types)
    return name if name in colors() else "mixed"


def _name(types: Mapping[str, str]) -> str:
    """Return the only type, also a custom quantizer, 'mixed', or 'none'."""
    used = {kind for kind in types.values() if kind != "none"}
    return next(iter(used)) if len(used) == 1 else "mixed" if used else "none"


def look(types: Mapping[str, str]) -> Look:
    """Return the look of a plain mode with these types by site; looks.py has all others."""
    on = {site for site, kind in types.items() if kind != "none"}
    dash = _DASHES.get((bool(on - {*ATTENTION_SITES}), "qk" in on, "pv" in on), _OTHER)
    color = colors()[family(types)]
    return Look(color.light, color.dark, dash)


def legend(types: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """Return the meaning of these runs' colors and of their dashes."""
    families = {_name(run_types): family(run_types) for run_types in types}
    rows = sorted(families.items())
    named = [f"{name} {colors()[row].name}" for name, row in rows if name != "none"]
    dashes = {look(run_types).dash for run_types in types if family(run_types) != "none"}
    lines = [text for dash, (_, text) in DASHES.items() if dash in dashes]
    return "; ".join((*named, f"unquantized {colors()['none'].name}")), "; ".join(lines)
