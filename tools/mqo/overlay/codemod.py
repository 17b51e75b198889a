"""The vocabulary of codemods: rules over many files, which match with `ast` and splice bytes.

A codemod has no count, because counts differ between versions, but a postcondition: its `leftovers`
must find nothing afterwards. It uses `ast` instead of LibCST because it visits hundreds of files,
and splicing leaves every byte outside of a match unchanged by construction.
"""

from __future__ import annotations

import ast
import re
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mqo.errors import DriftError
from mqo.overlay.drift import Place, in_upstream
from mqo.overlay.tree import running_python


@dataclass(frozen=True)
class Splice:
    """Replace the source of a node by `text`; an empty range inserts it."""

    line: int
    column: int
    end_line: int
    end_column: int
    text: bytes

    @classmethod
    def over(cls, node: ast.expr | ast.stmt, text: str) -> Splice:
        """Return a splice that replaces `node`."""
        return cls(node.lineno, node.col_offset, *end_of(node), text.encode())


@dataclass(frozen=True)
class Codemod:
    """A rule over the files below `roots` whose bytes match `needle`.

    `splices` returns the changes for one parsed file, `leftovers` the places that it should have
    changed but did not; the two are written independently, so that the second checks the first.
    Every form that they look for must have a match of `needle` in one line, because both visit only
    such statements.
    """

    roots: tuple[str, ...]
    needle: re.Pattern[bytes]
    splices: Callable[[Source], Iterable[Splice]]
    leftovers: Callable[[Source], Iterable[Place]]

    def concerns(self, path: str, source: bytes) -> bool:
        """Return whether the file at tree-relative `path` is worth parsing."""
        return path.startswith(self.roots) and self.needle.search(source) is not None


class Source:
    """One parsed file: its bytes, its syntax tree, and the bytes of any node."""

    def __init__(self, content: bytes, needle: re.Pattern[bytes]) -> None:
        self.content = content
        content.decode()  # in other encodings ast's columns would not be byte columns
        # Python 3.12 warns of upstream's invalid escape sequences, which users need not see.
        with warnings.catch_warnings(action="ignore"):
            self.tree = ast.parse(content)
        # ast counts columns in bytes of UTF-8, after a byte order mark.
        self._bom = len(b"\xef\xbb\xbf") if content.startswith(b"\xef\xbb\xbf") else 0
        self._starts = [0]
        for line in content.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        hits = (match.start() for match in needle.finditer(content))
        self._hits = [bisect_right(self._starts, hit) for hit in hits]

    def concerns(self, node: ast.AST) -> bool:
        """Return whether the needle is in a statement's lines; True for any other node."""
        if not isinstance(node, ast.stmt):
            return True
        at = bisect_left(self._hits, _first_line(node))
        return at < len(self._hits) and self._hits[at] <= end_of(node)[0]

    def walk(self) -> Iterator[ast.AST]:
        """Yield the nodes of the statements that hold the needle, and of what encloses them."""
        todo: list[ast.AST] = [self.tree]
        while todo:
            node = todo.pop()
            yield node
            todo += [child for child in ast.iter_child_nodes(node) if self.concerns(child)]

    @property
    def newline(self) -> bytes:
        """Return how the file ends its lines."""
        return b"\r\n" if b"\r\n" in self.content else b"\n"

    def offset(self, line: int, column: int) -> int:
        """Return the byte offset of a 1-based line and a 0-based column."""
        return self._starts[line - 1] + column + (self._bom if line == 1 else 0)

    def segment(self, node: ast.expr | ast.stmt) -> bytes:
        """Return the bytes of a node."""
        start = self.offset(node.lineno, node.col_offset)
        return self.content[start : self.offset(*end_of(node))]

    def spliced(self, splices: Iterable[Splice]) -> bytes:
        """Return the content with the splices; of two at one position, an insertion goes first."""
        parts: list[bytes] = []
        done = 0
        for s in sorted(splices, key=lambda s: (s.line, s.column, s.end_line, s.end_column)):
            start = self.offset(s.line, s.column)
            assert start >= done, f"splices overlap at line {s.line}"
            parts += [self.content[done:start], s.text]
            done = self.offset(s.end_line, s.end_column)
        return b"".join([*parts, self.content[done:]])

    def lines_over(self, node: ast.stmt, statements: list[str]) -> Splice:
        """Replace a statement by several one-line statements with its indentation."""
        before = self.content[self.offset(node.lineno, 0) :][: node.col_offset]
        separator = "; " if before.strip() else self.newline.decode() + before.decode()
        return Splice.over(node, separator.join(statements))

    def import_splice(self, statement: str) -> Splice:
        """Insert an import after the docstring and the `__future__` imports."""
        after = 0
        for i, node in enumerate(self.tree.body):
            docstring = (
                i == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            )
            future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
            if docstring or future:
                after, _ = end_of(node)
            else:
                break
        if after == 0 and self.tree.body:
            after = _first_line(self.tree.body[0]) - 1
        return Splice(after + 1, 0, after + 1, 0, statement.encode() + self.newline)


def apply_codemod(
    path: str, content: bytes, codemod: Codemod, entry: str, *, pristine: bytes | None = None
) -> bytes:
    """Return `content` after the codemod; raises DriftError if its postcondition fails.

    `pristine` is upstream's content, if earlier entries changed it: errors give its lines.
    """
    try:
        source = Source(content, codemod.needle)
    except (SyntaxError, ValueError) as error:
        raise DriftError(
            f"{path} does not parse as Python {running_python()} ({error})",
            expected=f"upstream's source, which codemod '{entry}' rewrites",
            help="`mqo vendor` fetches it again",
        ) from error
    try:
        new = source.spliced(codemod.splices(source))
    except DriftError as error:  # from the rule, which does not know the path
        raise DriftError(
            f"{path}: {error.found}", expected=error.expected, help=error.help
        ) from error
    try:
        after = source if new == content else Source(new, codemod.needle)
    except SyntaxError as error:
        raise DriftError(
            f"{path} is not valid Python after codemod '{entry}' ({error})",
            expected="a rule that fits every form it matches",
            help="Add this form to the rule in patches/",
        ) from error
    left = sorted(codemod.leftovers(after), key=lambda location: location.line)
    if left:
        origin = content if pristine is None else pristine
        locations = in_upstream(left, origin, new)
        raise DriftError(
            f"codemod '{entry}' leaves {len(locations)} unchanged: "
            + ", ".join(f"{path}:{location.line} {location.code}" for location in locations),
            expected="none",
            help="Add this form to the rule in patches/",
        )
    return new


def end_of(node: ast.expr | ast.stmt) -> tuple[int, int]:
    """Return the line and the column where a parsed node ends."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])
