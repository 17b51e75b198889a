"""Fit titles, labels and legends into a matplotlib figure, by their measured sizes."""

from __future__ import annotations

import textwrap
from typing import Any

EDGE = 0.15  # inches that stay free at the left and at the right of a figure


def wrapped(figure: Any, text: str, inches: float, size: float) -> str:
    """Return a text in lines of at most `inches` in the default font at `size` points."""
    return "\n".join(
        line for part in text.split("\n") for line in _lines(figure, part, inches, size)
    )


def _lines(figure: Any, text: str, inches: float, size: float) -> list[str]:
    columns = len(text)
    while columns > 1:
        lines = textwrap.wrap(text, columns, break_on_hyphens=False)
        widest = max(_width(figure, line, size) for line in lines)
        if widest <= inches:
            return lines
        columns = min(columns - 1, int(columns * inches / widest))
    return list(text)


def _width(figure: Any, line: str, size: float) -> float:
    """Return a line's width in inches."""
    from matplotlib.font_manager import FontProperties

    font = FontProperties(size=size)
    renderer = figure.canvas.get_renderer()
    return renderer.get_text_width_height_descent(line, font, ismath=False)[0] / figure.dpi


def add_title(figure: Any, text: str, size: float) -> None:
    """Add a title above a figure, which grows by its height; nothing for an empty text."""
    if text:
        lines = wrapped(figure, text, figure.get_figwidth() - 2 * EDGE, size)
        _grow(figure, figure.suptitle(lines, fontsize=size))


def add_legend(figure: Any, size: float) -> None:
    """Add a legend below a figure, which grows by its height.

    It has two columns, or one if two are too wide, with lines of text that are broken if one label
    is too wide.
    """
    width = figure.get_figwidth() - 2 * EDGE
    # A handle is long enough to show a dash.
    style: dict[str, Any] = {"frameon": False, "handlelength": 3, "borderpad": 0, "fontsize": size}
    for columns in (2, 1):
        legend = figure.legend(loc="outside lower center", ncols=columns, **style)
        if _extent(figure, legend).width <= width * figure.dpi:
            break
        if columns > 1:
            legend.remove()
    else:
        for text in legend.get_texts():  # without the handle and the gap after it
            text.set_text(wrapped(figure, text.get_text(), width - 5 * size / 72, size))
    _grow(figure, legend)


def _extent(figure: Any, artist: Any) -> Any:
    return artist.get_window_extent(figure.canvas.get_renderer())


def _grow(figure: Any, artist: Any) -> None:
    figure.set_figheight(figure.get_figheight() + _extent(figure, artist).height / figure.dpi)
