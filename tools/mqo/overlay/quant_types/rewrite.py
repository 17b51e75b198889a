"""Set the values of quant type literals with LibCST."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m

from mqo.errors import OverlayError
from mqo.quant.source import VARIABLE, Literal, Source

_TARGET = m.Name(VARIABLE)
_LITERAL = m.OneOf(
    m.Assign(targets=[m.AssignTarget(_TARGET)], value=m.SimpleString()),
    m.AnnAssign(target=_TARGET, value=m.SimpleString()),
)
_UNREADABLE = (cst.ParserSyntaxError, UnicodeError, RecursionError)


def set_values(path: str, content: bytes, values: Mapping[Literal, str]) -> bytes:
    """Return the content of the file at `path` with these literals' values, and no other byte, set.

    Raises:
        OverlayError: LibCST reads other literals than Python's parser, or the result differs from
            `content` in more than the values.
        SyntaxError, ValueError: `content` is not Python.
    """
    if not values:
        return content
    source = Source.parse(content)
    literals = list(source.literals.values())
    wanted = [values.get(literal, literal.value) for literal in literals]
    try:
        new = _whole(content, wanted)
        if new is None:
            new = _by_statement(source, wanted)
    except _UNREADABLE as error:
        raise _error(path, f"LibCST cannot parse it ({str(error).splitlines()[0]})") from error
    after = list(Source.parse(new).literals.values())
    if [literal.value for literal in after] != wanted:
        raise _error(path, "LibCST and Python's parser find different literals in it")
    if _between(content, literals) != _between(new, after):
        raise _error(path, "LibCST does not reproduce it byte for byte")
    return new


def _whole(content: bytes, values: Sequence[str]) -> bytes | None:
    """Return the module with its literals set; None if LibCST does not reproduce its bytes.

    LibCST drops some form feeds or refuses them, for example, and normalizes carriage returns.
    """
    try:
        module = cst.parse_module(content)
    except cst.ParserSyntaxError:
        return None
    return module.visit(_SetValues(values)).bytes if module.bytes == content else None


def _by_statement(source: Source, values: Sequence[str]) -> bytes:
    """Return the content after each literal's statement was parsed and set separately."""
    content = source.content
    pairs = zip(source.literals, values, strict=True)
    for statement, value in reversed(list(pairs)):
        start, end = source.span(statement)
        # In this encoding a character is a byte.
        parsed = cst.parse_module(content[start:end].decode("latin-1"))
        new = parsed.visit(_SetValues([value])).code.encode("latin-1")
        content = content[:start] + new + content[end:]
    return content


class _SetValues(cst.CSTTransformer):
    """Set the literals of a module, in source order."""

    def __init__(self, values: Sequence[str]) -> None:
        super().__init__()
        self._values = iter(values)

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> Any:
        # m.matches is slow, and nearly all nodes are of other kinds.
        if isinstance(updated_node, cst.Assign | cst.AnnAssign) and m.matches(
            updated_node, _LITERAL
        ):
            assert isinstance(updated_node.value, cst.SimpleString)
            return updated_node.with_changes(value=self._set(updated_node.value))
        return updated_node

    def _set(self, node: cst.SimpleString) -> cst.SimpleString:
        """Return a string with the next value and the prefix and quotes of `node`."""
        if "b" in node.prefix or set(node.raw_value) & set("'\"\\\r\n"):
            return node
        value = next(self._values, node.raw_value)
        prefix = node.value[: len(node.prefix)]  # node.prefix is in lower case
        return node.with_changes(value=f"{prefix}{node.quote}{value}{node.quote}")


def _between(content: bytes, literals: Sequence[Literal]) -> list[bytes]:
    """Return the bytes before, between and after the literals' values."""
    ends = [0, *(literal.end for literal in literals)]
    starts = [*(literal.start for literal in literals), len(content)]
    return [content[end:start] for end, start in zip(ends, starts, strict=True)]


def _error(path: str, fault: str) -> OverlayError:
    return OverlayError(
        f"{path} cannot be rewritten: {fault}",
        expected="a file in which only the values of the literals change",
        help="Set the types in an editor, or report this file",
    )
