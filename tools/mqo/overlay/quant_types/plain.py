"""Plain quant type literals in a source file, of any encoding and line ending, as byte spans.

`custom_quant_type = 'mxfp8'` is one, wherever it stands: with either quote, annotated, in brackets,
behind other code on its line. What is computed, concatenated or escaped is none.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from mqo.errors import OverlayError
from mqo.overlay import literals

_TOKEN = re.compile(
    rb"[rRuU]?(?P<quote>'''|\"\"\"|'|\")(?P<value>[^'\"\\\r\n]*)(?P=quote)",
)


@dataclass(frozen=True)
class Literal:
    """A plain literal: its value, its 1-based line, and where in the file's bytes the value is."""

    value: str
    line: int
    start: int
    end: int


@dataclass(frozen=True)
class Source:
    """A file: its bytes, its syntax tree, and the offsets at which its lines start."""

    content: bytes
    tree: ast.Module
    starts: tuple[int, ...]

    @classmethod
    def parse(cls, path: str, content: bytes) -> Source:
        """Raises OverlayError, with file and line, for what is not Python."""
        lines = content.splitlines(keepends=True)
        starts = tuple(accumulate(map(len, lines), initial=0))
        try:
            with warnings.catch_warnings(action="ignore"):
                return cls(content, ast.parse(content), starts)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            raise OverlayError(
                f"{path}:{line} cannot be read as Python ({str(error).split(' (')[0]})",
                expected="Python in UTF-8, or with a coding line that names the file's encoding",
                help="Mend the file, or give the folder of another tree to --tree",
            ) from error

    def literal(self, node: ast.AST) -> Literal | None:
        """The plain literal that `node` assigns to the variable, if it does."""
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=literals.VARIABLE)], value=value)
                | ast.AnnAssign(target=ast.Name(id=literals.VARIABLE), value=value)
            ) if isinstance(value, ast.Constant) and isinstance(value.value, str):
                start = self.starts[value.lineno - 1] + value.col_offset
                found = _TOKEN.match(self.content, start)
                if found and found["value"] == value.value.encode("utf-8", "surrogatepass"):
                    return Literal(value.value, value.lineno, *found.span("value"))
        return None

    def all_literals(self) -> list[Literal]:
        """Every plain literal of the file, in source order."""
        found = filter(None, map(self.literal, ast.walk(self.tree)))
        return sorted(found, key=lambda literal: literal.start)


def splice(content: bytes, values: Mapping[Literal, str]) -> bytes:
    """`content` with the values of these literals, and no other byte, replaced."""
    for literal in sorted(values, key=lambda literal: literal.start, reverse=True):
        content = content[: literal.start] + values[literal].encode() + content[literal.end :]
    return content
