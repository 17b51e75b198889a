"""The quant type literals in the source, which define the quantization statically.

A site is a line `custom_quant_type = '...'` and the next statement, which names the site. Types and
the parser come from `mqo.quant`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from mqo.errors import OverlayError
from mqo.quant.formats import NONE
from mqo.quant.source import VARIABLE, Literal, Source, splice


def read(content: bytes) -> list[Literal]:
    """Return the literals of sites in a patched file, in source order.

    Raises:
        OverlayError: it does not parse.
    """
    return [literal for literal in _all(content) if literal.site]


def read_if_any(content: bytes) -> list[Literal]:
    """Return what `read` does; none in a file that no longer parses."""
    try:
        return read(content)
    except OverlayError:
        return []


def write(content: bytes, types: Mapping[str, str]) -> bytes:
    """Return `content` with the named sites' literals set; sites that it lacks are ignored."""
    chosen = (literal for literal in read(content) if literal.site in types)
    return splice(content, {literal: types[literal.site] for literal in chosen})


def neutral(content: bytes) -> bytes:
    """Return `content` with every literal at 'none', as the patch writes it, if it parses."""
    try:
        return splice(content, dict.fromkeys(_all(content), NONE))
    except OverlayError:
        return content


@lru_cache(maxsize=64)  # a command reads a few files many times
def _all(content: bytes) -> tuple[Literal, ...]:
    if VARIABLE.encode() not in content:
        return ()
    try:
        return tuple(Source.parse(content).literals.values())
    except (SyntaxError, ValueError) as error:
        raise OverlayError(
            f"A file with quant sites does not parse as Python ({error})",
            expected="what the patches wrote, except for the quant types",
            help="`mqo diff` shows what was changed by hand",
        ) from error
