"""The layers that a run leaves unquantized: patterns, matched against their labels.

A pattern is GLOB or SITE:GLOB. Case counts, `*` goes across dots, and a pattern must match the
whole label: `output_layer`, `decoder.layers.0.*`, `qk:decoder.layers.1.*`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from .formats import SITES, check_choice

if TYPE_CHECKING:
    from .layers import Layer  # which imports torch

NEAREST = 3


def split(pattern: str) -> tuple[str | None, str]:
    """Return the one site that a pattern is for, None for all, and its glob."""
    site, colon, glob = pattern.rpartition(":")
    return (site if colon else None), glob


def check(patterns: object) -> None:
    """Raise ValueError unless `patterns` is a list of patterns, each with a site that exists."""
    if not isinstance(patterns, list) or not all(isinstance(p, str) and p for p in patterns):
        raise ValueError(f"{patterns!r} is no list of patterns, such as ['output_layer']")
    for site, glob in map(split, patterns):
        if site is not None:
            check_choice("GEMM site", site, tuple(SITES))
        if not glob:
            raise ValueError(f"'{site}:' names no layer; valid: SITE:GLOB")


def matches(pattern: str, site: str, layer: str) -> bool:
    """Whether `pattern` excludes `layer` at `site`."""
    only, glob = split(pattern)
    return only in (None, site) and fnmatchcase(layer, glob)


def unmatched(patterns: Iterable[str], layers: Iterable[Layer]) -> list[str]:
    """Say, one text each, which patterns exclude nothing: a misspelt one must not go unnoticed.

    `layers` are those of all ranks, for a pipeline stage holds only some.
    """
    layers, faults = list(layers), []
    for pattern in patterns:
        site, glob = split(pattern)
        kinds = {SITES[site].layer} if site else {s.layer for s in SITES.values()}
        names = sorted({layer.name for layer in layers if layer.kind in kinds})
        if not any(fnmatchcase(name, glob) for name in names):
            near = difflib.get_close_matches(glob.rstrip("*."), names, NEAREST, cutoff=0.0)
            nearest = f"the nearest are {', '.join(near)}" if near else "there is none to match"
            faults.append(f"exclude '{pattern}' matches no layer with such a GEMM; {nearest}")
    return faults
