"""The quant type literals in the source: the only static statement of what is quantised.

A site is a line `custom_quant_type = '...'` and the binding behind it that names the site. Reading
needs `ast` alone, and writing changes the text between the quotes and no other byte.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from mqo.errors import UnknownNameError

VARIABLE = "custom_quant_type"
NONE = "none"
TYPES = ("hifp8", "mxfp8", "mxfp4", NONE)
_LINE = re.compile(rb"^([ \t]*custom_quant_type = ')([^'\r\n]*)(')", re.MULTILINE)


@dataclass(frozen=True)
class TypeLiteral:
    """One literal: its site (fprop, dgrad, wgrad, qk, pv), its value, and its 1-based line."""

    site: str
    value: str
    line: int


def read(content: bytes) -> list[TypeLiteral]:
    """The literals of a patched file, in source order."""
    needle = VARIABLE.encode()
    lines = [n for n, line in enumerate(content.splitlines(), 1) if needle in line]
    found: list[TypeLiteral] = []
    for block in _blocks_over(ast.parse(content) if lines else ast.Module([], []), lines):
        found += filter(None, map(_literal, block, block[1:]))
    return sorted(found, key=lambda literal: literal.line)


def write(content: bytes, types: Mapping[str, str]) -> bytes:
    """`content` with the literals of the named sites set; sites it does not hold are ignored."""
    lines = content.splitlines(keepends=True)
    for literal in read(content):
        if literal.site in types:
            new = rb"\g<1>" + types[literal.site].encode() + rb"\g<3>"
            lines[literal.line - 1] = _LINE.sub(new, lines[literal.line - 1])
    return b"".join(lines)


def neutral(content: bytes) -> bytes:
    """`content` with every literal at 'none', as the patch writes it."""
    return _LINE.sub(rb"\g<1>" + NONE.encode() + rb"\g<3>", content)


def check_sites(types: Mapping[str, str], known: Mapping[str, object]) -> None:
    """UnknownNameError for a site that the tree does not hold."""
    for site in types:
        if site not in known:
            raise UnknownNameError("GEMM site", site, known)


def _blocks_over(node: ast.AST, lines: Sequence[int]) -> Iterator[list[ast.stmt]]:
    """The blocks in `node` that stand around one of the lines (all of them would take long)."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        children = getattr(node, name, None)
        if not isinstance(children, list) or not children:
            continue
        if isinstance(children[0], ast.stmt):
            yield children
        for child in children:
            ends = (child.end_lineno or 0) if hasattr(child, "lineno") else max(lines)
            starts = child.lineno if hasattr(child, "lineno") else 0
            if any(starts <= line <= ends for line in lines):
                yield from _blocks_over(child, lines)


def _literal(statement: ast.stmt, behind: ast.stmt) -> TypeLiteral | None:
    """A literal, when `statement` assigns one and `behind` binds it to a site."""
    match statement, behind:
        case (
            ast.Assign(
                targets=[ast.Name(id="custom_quant_type")], value=ast.Constant(value=str(value))
            ),
            ast.Assign(value=ast.Call(args=[ast.Constant(value=str(site)), *_])),
        ):
            return TypeLiteral(site, value, statement.lineno)
    return None
