"""Parse the quant type literals of a source file.

`custom_quant_type = 'mxfp8'` is a literal anywhere: with either quote, with an annotation, in
brackets, after other code on its line, in a file with any encoding and line ending. A computed,
concatenated or escaped value is not a literal.

This module imports only the standard library, because commands do not load torch.
"""

import ast
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from pathlib import Path

VARIABLE = "custom_quant_type"
_TOKEN = re.compile(rb"[rRuU]?(?P<quote>'''|\"\"\"|'|\")(?P<value>[^'\"\\\r\n]*)(?P=quote)")
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


@dataclass(frozen=True)
class Literal:
    """A literal: its value, its 1-based line, and the position of the value in the file's bytes.

    `site` is the GEMM site in the next statement, as in `f('qk', custom_quant_type)`, or empty.
    """

    value: str
    line: int
    start: int
    end: int
    site: str = ""


@dataclass(frozen=True)
class Source:
    """A file: its bytes, its syntax tree, and its literals by their statements, in source order.

    `starts` holds the position of each line in `content`; it is empty without literals.
    """

    content: bytes
    tree: ast.Module
    literals: dict[ast.stmt, Literal]
    starts: list[int]

    @classmethod
    def parse(cls, content: bytes) -> "Source":
        """Parse a file.

        Raises:
            SyntaxError, ValueError: the content is not Python.
        """
        with warnings.catch_warnings(action="ignore"):
            try:
                tree = ast.parse(content)
            except (RecursionError, MemoryError) as error:
                raise SyntaxError("nested too deeply") from error
        lines = content.splitlines(keepends=True) if VARIABLE.encode() in content else []
        starts = list(accumulate(map(len, lines), initial=0))
        pairs = ((s, after) for b in _blocks(tree) for s, after in zip_longest(b, b[1:]))
        literals = {s: _literal(content, starts, s, after) for s, after in pairs} if lines else {}
        plain = {statement: literal for statement, literal in literals.items() if literal}
        ordered = dict(sorted(plain.items(), key=lambda item: item[1].start))
        return cls(content, tree, ordered, starts)

    def span(self, statement: ast.stmt) -> tuple[int, int]:
        """Return the positions of the first byte of a literal's statement, and after its last."""
        return _span(self.starts, statement)


def splice(content: bytes, values: Mapping[Literal, str]) -> bytes:
    """Return `content` with the values of these literals, and no other byte, replaced."""
    for literal in sorted(values, key=lambda literal: literal.start, reverse=True):
        content = content[: literal.start] + values[literal].encode() + content[literal.end :]
    return content


def site_types(path: str) -> dict[str, str]:
    """Return the {site: quant type} of the literals in the source file at `path`.

    Raises:
        OSError, SyntaxError, ValueError: the file is missing, or is not Python.
    """
    literals = Source.parse(Path(path).read_bytes()).literals.values()
    return {literal.site: literal.value for literal in literals if literal.site}


def _span(starts: list[int], node: ast.stmt | ast.expr) -> tuple[int, int]:
    """Return the positions of a node's first byte, and after its last."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    first = starts[node.lineno - 1] + node.col_offset
    return first, starts[node.end_lineno - 1] + node.end_col_offset


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield every list of statements in `node`, including handlers and cases of a `match`."""
    for name in _BLOCKS:
        block = getattr(node, name, [])
        yield block
        for child in block:
            yield from _blocks(child)


def _literal(
    content: bytes, starts: list[int], statement: ast.AST, after: ast.AST | None
) -> Literal | None:
    """Return `statement` as a literal, with the site in the next statement; None if it is not."""
    match statement:
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text)) as value)
            | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(text)) as value)
        ) if name == VARIABLE:
            first, last = _span(starts, value)
            token = _TOKEN.fullmatch(content, first, last)
            if token and token["value"] == text.encode("utf-8", "surrogatepass"):
                return Literal(text, value.lineno, *token.span("value"), _site(after))
    return None


def _site(binding: ast.AST | None) -> str:
    match binding:
        case ast.Assign(
            value=ast.Call(args=[ast.Constant(value=str(site)), ast.Name(id=name), *_])
        ):
            return site if name == VARIABLE else ""
    return ""
