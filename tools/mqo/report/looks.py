"""The look of each variant, the same in every picture: color, dash, lightness and marker.

The format gives the color and the quantized sites the dash (colors.py). A mode without changes has
the format's own color and no marker. Any other variant (a recipe, other options) has a lightness of
this color and a marker, chosen by its name.
"""

from __future__ import annotations

import colorsys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mqo.matrix.tables import modes
from mqo.report.colors import SYMBOLS, Look, look
from mqo.report.rows import Row

PAGES = {"light": "#ffffff", "dark": "#1b1f24"}
LEAST, MOST, APART = 3.0, 15.0, 1.6  # contrast to a page; ratio between two lightnesses
_SHADES = 3
# Markers and lightnesses have no common factor, so consecutive slots differ in both.
_SLOTS = (len(SYMBOLS) - 1) * _SHADES


def looks(variants: Iterable[tuple[str, Mapping[str, str]]]) -> list[Look]:
    """Return a look per variant, given as its name and its types by site.

    A name has the same look in every picture. If several names of one picture would look the same,
    only the first in alphabetical order has its look; the others take free slots.
    """
    variants = list(variants)
    names, bases = [name for name, _ in variants], [look(types) for _, types in variants]
    slots = [_preferred(name) for name in names]
    taken: set[tuple[Look, int]] = set()
    moved = []
    for i in sorted(range(len(names)), key=lambda i: names[i]):
        if (bases[i], slots[i]) in taken:
            moved.append(i)
        taken.add((bases[i], slots[i]))
    for i in moved:
        following = (1 + (slots[i] + n) % _SLOTS for n in range(_SLOTS))
        slots[i] = next((p for p in following if (bases[i], p) not in taken), slots[i])
        taken.add((bases[i], slots[i]))
    return [_placed(base, slot) for base, slot in zip(bases, slots, strict=True)]


def by_variant(rows: Sequence[Row]) -> dict[str, Look]:
    """Return the look of each variant of a comparison."""
    known = looks((row.variant, row.types) for row in rows)
    return {row.variant: its_look for row, its_look in zip(rows, known, strict=True)}


def _preferred(name: str) -> int:
    """Return a variant's slot; 0 is the plain look of a mode."""
    return 0 if name in modes() else 1 + zlib.crc32(name.encode()) % _SLOTS


def _placed(base: Look, slot: int) -> Look:
    if not slot:
        return base
    shade, symbol = slot % _SHADES, SYMBOLS[1 + (slot - 1) % (len(SYMBOLS) - 1)]
    colors = {page: shaded(getattr(base, page), PAGES[page])[shade] for page in PAGES}
    return replace(base, symbol=symbol, **colors)


# -- lightness -------------------------------------------------------------------------------------


def shaded(color: str, page: str) -> list[str]:
    """Return a color and _SHADES - 1 lighter or darker ones that also stand out from the page."""
    own, ground = luminance(color), luminance(page)
    contrast = (max(own, ground) + 0.05) / (min(own, ground) + 0.05)
    ratios = [contrast * APART**n for n in (1, -1, 2, -2, 3)]
    fitting = [ratio for ratio in ratios if LEAST <= ratio <= MOST]
    fitting = (fitting + ratios)[: _SHADES - 1]  # a user's color may be close to its page's
    to_luminance = (
        (lambda r: r * (ground + 0.05)) if own > ground else lambda r: (ground + 0.05) / r
    )
    return [color, *(_with_luminance(color, to_luminance(ratio) - 0.05) for ratio in fitting)]


def luminance(color: str) -> float:
    """Return the relative luminance (WCAG 2) of #rrggbb, from 0 to 1."""
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in _parts(color)]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _with_luminance(color: str, target: float) -> str:
    """Return #rrggbb with another lightness (of HLS); hue and saturation stay."""
    hue, _, saturation = colorsys.rgb_to_hls(*_parts(color))
    low, high = 0.0, 1.0
    for _ in range(12):  # halvings; a color has 8 bits
        middle = (low + high) / 2
        parts = colorsys.hls_to_rgb(hue, middle, saturation)
        mixed = "#" + "".join(f"{round(255 * part):02x}" for part in parts)
        low, high = (middle, high) if luminance(mixed) < target else (low, middle)
    return mixed


def _parts(color: str) -> list[float]:
    return [int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)]
