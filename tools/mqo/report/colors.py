"""The look of a mode, the same in every plot: its color tells the format, its dash the sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mqo.report.compare import Group

from mqo.torch_free import formats

# From few quantized sites to many, for light pages and for dark ones; the last one repeats. Each
# has a contrast of 3:1 or more to its page; a test checks that. Formats' are in formats.toml.
LIGHT = {name: row.light for name, row in formats.FORMATS.items()} | {
    "none": ("#1c2127",),
    "mixed": ("#a05ad6", "#8a3fc0", "#7228a3", "#5b1c86"),
}
DARK = {name: row.dark for name, row in formats.FORMATS.items()} | {
    "none": ("#e9edf2",),
    "mixed": ("#d9b3ff", "#c592ff", "#b27bff", "#e39bff"),
}
# (quantized linear layers, QK, PV) -> the shade, and the dash in plotly's words.
_LOOKS = {
    (False, False, False): (0, "solid"),
    (False, True, False): (0, "dot"),
    (True, False, False): (1, "dash"),
    (True, True, False): (2, "solid"),
    (True, True, True): (3, "longdashdot"),
}
_OTHER = (0, "dashdot")
# The dashes, and the shapes of points for curves that share a look, in matplotlib's words.
DASHES = {
    "solid": "-",
    "dot": ":",
    "dash": "--",
    "dashdot": "-.",
    "longdashdot": (0, (8, 2, 1, 2)),
}


@dataclass(frozen=True)
class Look:
    """Colors as #rrggbb, and a dash that plotly knows."""

    light: str
    dark: str
    dash: str


def look(types: Mapping[str, str]) -> Look:
    """The look of a run with these types by site."""
    used = {kind for kind in types.values() if kind != "none"}
    family = next(iter(used)) if len(used) == 1 else "mixed" if used else "none"
    family = family if family in LIGHT else "mixed"
    on = {site for site, kind in types.items() if kind != "none"}
    shade, dash = _LOOKS.get((bool(on - {"qk", "pv"}), "qk" in on, "pv" in on), _OTHER)
    light, dark = (shades[min(shade, len(shades) - 1)] for shades in (LIGHT[family], DARK[family]))
    return Look(light, dark, dash)


@dataclass(frozen=True)
class Symbol:
    """The shape of a curve's points by plotly's name, by matplotlib's, and as a letter."""

    plotly: str
    matplotlib: str
    letter: str


SYMBOLS = (
    Symbol("circle", "o", "●"),
    Symbol("square", "s", "■"),
    Symbol("diamond", "D", "◆"),
    Symbol("triangle-up", "^", "▲"),
    Symbol("x", "X", "✖"),
)


def symbol(group: Group, variant: str) -> Symbol:
    """Return the variant's symbol: the first one, but for further variants of one look."""
    looks = {row.variant: look(row.types) for row in group.rows}
    same = [name for name, one in looks.items() if one == looks[variant]]
    return SYMBOLS[same.index(variant) % len(SYMBOLS)]
