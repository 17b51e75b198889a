"""Finds the quant type literals of each GEMM site by structure, also in hand-patched trees.

The convention is a line `custom_quant_type = '...'` at a site. In the methods of gemms.METHODS:

1. Our patches' binding, `f('<site>', custom_quant_type, ...)`, decides the site that it names.
2. Without one, the uses of the variable before the site's GEMM decide (`if` and `elif`, say), as
   far as they see what the GEMM's operands were computed with, or else what the GEMM itself sees:
   a use left over from another GEMM does not count.
3. Without these, what the GEMM's operands were computed with, or else what reaches it, decides, as
   far as it is no earlier site's.

The site's literals are those that reach what decides it; there are several where branches have one
each. A site is refused, with file and line, when something other than a plain string literal
reaches, when one of the literals is an earlier site's, or when there is none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mqo.overlay.literals import VARIABLE
from mqo.overlay.quant_types import gemms, reach
from mqo.overlay.quant_types.gemms import METHODS, Event, Method
from mqo.overlay.quant_types.plain import Literal, Source
from mqo.overlay.quant_types.reach import Definition


@dataclass(frozen=True)
class Place:
    """A site in the source: its literals, in source order, or why they cannot be edited.

    `shares` names the earlier site whose literal this site uses. `bound` says that our patches'
    binding names the site.
    """

    site: str
    path: str
    line: int
    literals: tuple[Literal, ...] = ()
    note: str = ""
    refusal: str = ""
    shares: str = ""
    bound: bool = False

    @property
    def values(self) -> tuple[str, ...]:
        """What the source says, each value once: several where branches differ, none if unknown."""
        return tuple(dict.fromkeys(literal.value for literal in self.literals))


@dataclass(frozen=True)
class FileScan:
    """The sites of one file, and the lines of literals outside of the methods that hold sites."""

    places: tuple[Place, ...]
    strays: tuple[int, ...] = ()


def scan(path: str, content: bytes | None) -> FileScan:
    """The sites that the file at tree-relative `path` should hold; `content` None: no such file.

    Raises OverlayError for a file that is not Python.
    """
    methods = [method for method in METHODS if method.path == path]
    if content is None:
        places = (_absent(s, path, 1, f"{path} does not exist") for m in methods for s in m.sites)
        return FileScan(tuple(places))
    source = Source.parse(path, content)
    found: list[Place] = []
    spans: list[range] = []
    for method in methods:
        functions = _functions(source.tree, method.scope)
        if len(functions) == 1:
            found += _places(method, functions[0], source)
            spans.append(range(functions[0].lineno, (functions[0].end_lineno or 0) + 1))
        else:
            line = functions[1].lineno if functions else 1
            why = (
                f"{path}:{line} " + ("has another" if functions else "has no") + f" {method.scope}"
            )
            found += [_absent(site, path, line, why) for site in method.sites]
    lines = (literal.line for literal in source.all_literals())
    return FileScan(tuple(found), tuple(n for n in lines if not any(n in s for s in spans)))


def _functions(tree: ast.Module, scope: str) -> list[ast.FunctionDef]:
    """The definitions of `Class.method`, those under `if` and `try` included."""
    level: list[ast.AST] = [tree]
    for name in scope.split("."):
        level = [d for node in level for d in _definitions_in(node) if d.name == name]
    return [node for node in level if isinstance(node, ast.FunctionDef)]


def _definitions_in(node: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield child
        elif isinstance(child, ast.stmt | ast.excepthandler):
            yield from _definitions_in(child)


def _places(method: Method, function: ast.FunctionDef, source: Source) -> list[Place]:
    events = gemms.events(method, reach.steps(function, source))
    written = [lit for lit in source.all_literals() if function.lineno <= lit.line]
    places: list[Place] = []
    owners: dict[Literal, str] = {}
    for site in method.sites:
        mine = [event for event in events if event.site == site]
        if mine:
            place = _place(method, site, mine, owners, written)
        else:
            line = function.lineno
            why = f"{method.path}:{line} ({method.scope}) has no GEMM that is known as {site}'s"
            place = _absent(site, method.path, line, why)
        owners |= dict.fromkeys(place.literals, place.shares or site)
        places.append(place)
    return places


def _place(
    method: Method,
    site: str,
    events: Sequence[Event],
    owners: Mapping[Literal, str],
    written: Sequence[Literal],
) -> Place:
    """A site from its events; `owners` are earlier sites, `written` the literals from there on."""
    path, (kind, line, reaching) = method.path, _decided(events)
    if kind == "gemm":
        reaching = frozenset(d for d in reaching if d.literal not in owners)
    if not reaching:
        why = f"{path}:{line} ({method.scope}) uses no literal for the GEMM of {site}"
        return _absent(site, path, line, why)
    by = min((d.line for d in reaching if not d.literal), default=None)
    if by is not None:
        before = [lit for lit in written if lit.line < by and lit not in owners]
        return _overwritten(path, site, by, before[-1] if before else None)
    mine = sorted((d.literal for d in reaching if d.literal), key=lambda literal: literal.start)
    for literal in mine:
        if literal in owners:
            return _shared(path, site, line, literal, owners[literal])
    lines = " and ".join(f"{literal.line} ({literal.value})" for literal in mine)
    notes = ["nothing reads it before its GEMM"] * (kind == "gemm")
    notes += [f"lines {lines}"] * (len(mine) > 1)
    return Place(site, path, mine[0].line, tuple(mine), ", ".join(notes), bound=kind == "binding")


def _decided(events: Sequence[Event]) -> tuple[str, int, frozenset[Definition]]:
    """The kind and first line of the events that decide a site, and the definitions they see."""
    bindings, uses, products = (
        [event for event in events if event.kind == kind] for kind in ("binding", "use", "gemm")
    )
    carried = _union(event.carried for event in products)
    reaching = _union(event.reaching for event in products)
    chosen = (
        bindings
        or [use for use in uses if use.reaching & carried]
        or [use for use in uses if use.reaching & reaching or not products]
    )
    if chosen:
        return chosen[0].kind, chosen[0].line, _union(event.reaching for event in chosen)
    return "gemm", events[0].line, carried or reaching


def _union(sets: Iterable[frozenset[Definition]]) -> frozenset[Definition]:
    return frozenset().union(*sets)


def _absent(site: str, path: str, line: int, why: str) -> Place:
    return Place(site, path, line, note="absent", refusal=why)


def _overwritten(path: str, site: str, by: int, literal: Literal | None) -> Place:
    if literal is None:
        why = f"{path}:{by} sets {VARIABLE} for {site}, and not by a plain string literal"
        return Place(site, path, by, note="set by no plain literal", refusal=why)
    why = f"{path}:{by} overwrites the literal of {site} at line {literal.line} before its GEMM"
    return Place(site, path, literal.line, note=f"overwritten by line {by}", refusal=why)


def _shared(path: str, site: str, line: int, literal: Literal, owner: str) -> Place:
    why = (
        f"{path}:{line} uses the literal of {owner} at line {literal.line} for {site}, which has "
        "none of its own"
    )
    note = f"reuses the literal of {owner}"
    return Place(site, path, literal.line, (literal,), note, why, shares=owner)
