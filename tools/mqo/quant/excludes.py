"""Patterns that match layers by their labels: those that a run excludes, or the only ones.

A pattern is GLOB or SITE:GLOB, where SITE may be a kind of sites, linear or attention. Case counts,
`*` goes across dots, and a pattern must match the whole label: `output_layer`,
`decoder.layers.0.*`, `qk:decoder.layers.1.*`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any

from mqo.quant.formats import ATTENTION, LINEAR, SITES, GemmSite, check_choice

NEAREST = 3


def split(pattern: str) -> tuple[str | None, str]:
    """Split a pattern into its site, or kind of sites (None for all), and its glob."""
    site, colon, glob = pattern.rpartition(":")
    return (site if colon else None), glob


def check(patterns: object) -> None:
    """Raise ValueError unless `patterns` is a list of patterns, each with a site that exists."""
    if not isinstance(patterns, list) or not all(isinstance(p, str) and p for p in patterns):
        raise ValueError(f"{patterns!r} is not a list of patterns; valid: ['output_layer']")
    for site, glob in map(split, patterns):
        if site is not None:
            check_choice("GEMM site or kind of them", site, (*SITES, LINEAR, ATTENTION))
        if not glob:
            raise ValueError(f"'{site}:' does not name a layer; valid: SITE:GLOB")


def is_for(pattern: str, site: GemmSite) -> bool:
    """Return whether `pattern` is for a site, with any layers."""
    return split(pattern)[0] in (None, site.name, site.layer)


def matches(pattern: str, site: str, layer: str) -> bool:
    """Return whether `pattern` names `layer` at `site`."""
    return is_for(pattern, SITES[site]) and fnmatchcase(layer, split(pattern)[1])


def leave_out(exclude: Iterable[str], include: Collection[str], site: str, layer: str) -> bool:
    """Return whether `layer` stays unquantized at `site`.

    It does if a pattern of `exclude` matches it, or if `include` has patterns and none matches it.
    """
    if include and not any(matches(pattern, site, layer) for pattern in include):
        return True
    return any(matches(pattern, site, layer) for pattern in exclude)


def unmatched(patterns: Iterable[str], layers: Iterable[Any]) -> list[str]:
    """Return one text per pattern that matches nothing, so that a misspelled one is noticed.

    `layers` have a name and a kind. They are those of all ranks: a pipeline stage has only some.
    """
    layers, faults = list(layers), []
    for pattern in patterns:
        glob = split(pattern)[1]
        kinds = {site.layer for site in SITES.values() if is_for(pattern, site)}
        names = sorted({layer.name for layer in layers if layer.kind in kinds})
        if not any(fnmatchcase(name, glob) for name in names):
            near = difflib.get_close_matches(glob.rstrip("*."), names, NEAREST, cutoff=0.0)
            nearest = f"the nearest are {', '.join(near)}" if near else "the model has none"
            faults.append(f"the pattern '{pattern}' matches no layer with such a GEMM; {nearest}")
    return faults
