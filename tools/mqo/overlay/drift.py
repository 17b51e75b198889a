"""The places in a drift report: where a pattern occurs, and the code most similar to it.

The report is for the person who revises the patch; these places are never patched. Line numbers
refer to upstream's file, without lines that earlier entries of the series inserted.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher, get_close_matches

NEAREST = 3
# The least similarity of code to a pattern, as the ratio of difflib's SequenceMatcher.
SIMILAR = 0.6
WIDTH = 100


@dataclass(frozen=True)
class Place:
    """A 1-based line, and the code (or the name of the function) that starts there."""

    line: int
    code: str

    def at(self, path: str) -> str:
        """Return file, line, and the code in one line, for the report."""
        return f"{path}:{self.line} `{textwrap.shorten(self.code, WIDTH, placeholder=' ...')}`"


def nearest(pattern: str, locations: Iterable[Place]) -> list[Place]:
    """Return up to three places that resemble `pattern`, the most similar first."""
    scored = [(_likeness(pattern, location.code), location) for location in locations]
    scored = [(likeness, location) for likeness, location in scored if likeness[0] >= SIMILAR]
    scored.sort(key=lambda pair: pair[0], reverse=True)
    best: dict[int, Place] = {}
    for _, location in scored:
        best.setdefault(location.line, location)
    return list(best.values())[:NEAREST]


def _likeness(pattern: str, code: str) -> tuple[float, float]:
    """Return the similarity by tokens, and by letters: from 0 (nothing in common) to 1."""
    tokens = SequenceMatcher(None, _tokens(code), _tokens(pattern), autojunk=False)
    if tokens.real_quick_ratio() < SIMILAR or tokens.quick_ratio() < SIMILAR:
        return 0.0, 0.0
    return tokens.ratio(), SequenceMatcher(None, code, pattern, autojunk=False).ratio()


def nearest_names(name: str, names: Iterable[str], separator: str) -> list[str]:
    """Return up to three of `names`: those that end in the same part ("A.f", "B.f") first."""
    names = list(dict.fromkeys(names))
    last = name.rpartition(separator)[2]
    same = [n for n in names if n.rpartition(separator)[2] == last]
    same.sort(key=lambda n: -SequenceMatcher(None, n, name).ratio())
    close = get_close_matches(name, names, NEAREST, SIMILAR)
    return list(dict.fromkeys([*same, *close]))[:NEAREST]


def locations_text(path: str, places: Sequence[Place], near: Sequence[Place] | None) -> str:
    """Return the end of a sentence: all `places`, and the nearest if they were searched for."""
    at = ", ".join(f"{path}:{location.line}" for location in places)
    text = f", at {at}" if at else ""
    if near is None:
        return text
    return f"{text}; nearest: {', '.join(location.at(path) for location in near) or 'none'}"


def in_upstream(locations: Iterable[Place], pristine: bytes, content: bytes) -> list[Place]:
    """Return the places of `content` with the line numbers of `pristine`, its original.

    A line that a patch changed gets the first line that it replaces.
    """
    if content == pristine:
        return list(locations)
    matcher = SequenceMatcher(None, pristine.splitlines(), content.splitlines(), autojunk=False)
    lines: list[int] = []
    for kind, start, _, new_start, new_end in matcher.get_opcodes():
        moved = range(start + 1, start + 1 + new_end - new_start)
        lines += moved if kind == "equal" else [start + 1] * len(moved)
    return [replace(location, line=lines[location.line - 1]) for location in locations]


def _tokens(code: str) -> list[str]:
    """Return names, numbers and punctuation, without whitespace and a pattern's `...`."""
    return [token for token in re.findall(r"\.\.\.|\w+|[^\w\s]", code) if token != "..."]
