"""Find functions and patterns in LibCST trees; an unexpected number of matches is an error.

Patterns are compared by structure: layout, quotes and redundant parentheses do not count.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from mqo.overlay.drift import Place, nearest, nearest_names

Function = cst.FunctionDef
Block = cst.IndentedBlock
DEFINITIONS = (cst.ClassDef, cst.FunctionDef)

# Fields that carry layout, not meaning.
_LAYOUT = {"lpar", "rpar", "comma", "semicolon", "leading_lines", "trailing_whitespace", "newline"}


class CountOffError(Exception):
    """A pattern or function occurs an unexpected number of times.

    `places` are its occurrences; `near` are the most similar places, if there are too few.
    """

    def __init__(
        self, text: str, places: Sequence[Place] = (), near: Sequence[Place] | None = None
    ) -> None:
        super().__init__(text)
        self.places, self.near = places, near


def find_pattern(module: cst.Module, scope: Scope, pattern: str, count: int) -> list[cst.CSTNode]:
    """Return the nodes of `scope` that match; CountOffError unless there are `count` of them."""
    wanted = _parse_pattern(pattern)
    matches = [node for node in scope.nodes if _same(wanted, node)]
    if len(matches) != count:
        raise CountOffError(
            f"`{pattern}` occurs {len(matches)} times instead of {count}",
            _places(module, matches),
            _look_alikes(module, scope, pattern, matches) if len(matches) < count else None,
        )
    return matches


def _look_alikes(
    module: cst.Module, scope: Scope, pattern: str, matches: Sequence[cst.CSTNode]
) -> list[Place]:
    """Return code similar to a pattern in the scope, else anywhere, since code moves to helpers."""
    is_expression = isinstance(_parse_pattern(pattern), cst.BaseExpression)
    kind = cst.BaseExpression if is_expression else cst.BaseSmallStatement
    for searched in (scope, Scope(module)):
        others = [n for n in searched.nodes if isinstance(n, kind) and n not in matches]
        candidates = nearest(pattern, _places(module, others))
        if candidates:
            return candidates
    return []


def find_function(module: cst.Module, scope: str) -> list[cst.CSTNode]:
    """Return the function at the path `scope` ("Class.method"), after the nodes around it."""
    functions = [path for path in _paths([module]) if isinstance(path[-1], Function)]
    named = {".".join(d.name.value for d in path[1:]): path[-1] for path in functions}
    matches = [path for path in functions if ".".join(d.name.value for d in path[1:]) == scope]
    if len(matches) == 1:
        return matches[0]
    near = nearest_names(scope, named, ".")  # of the same name elsewhere, then similar ones
    locations = zip(_places(module, [named[name] for name in near]), near, strict=True)
    raise CountOffError(
        f"function `{scope}` is defined {len(matches)} times instead of once",
        _places(module, [path[-1] for path in matches]),
        None if matches else [replace(location, code=name) for location, name in locations],
    )


def _paths(path: list[Any]) -> Iterator[list[Any]]:
    """Yield the definitions below the last node of `path`, each after the nodes around it."""
    for definition in _definitions(path[-1]):
        yield [*path, definition]
        yield from _paths([*path, definition])


def _places(module: cst.Module, nodes: Sequence[cst.CSTNode]) -> list[Place]:
    """Return the lines and the code of nodes of the module."""
    if not nodes:
        return []
    positions = MetadataWrapper(module, unsafe_skip_copy=True).resolve(PositionProvider)
    return [Place(positions[node].start.line, module.code_for_node(node)) for node in nodes]


def _definitions(node: cst.CSTNode) -> list[cst.ClassDef | Function]:
    """Return classes and functions directly in `node`, those under `if` and `try` included."""
    definitions: list[cst.ClassDef | Function] = []
    for child in _children(node):
        if isinstance(child, DEFINITIONS):
            definitions.append(child)
        elif isinstance(child, cst.BaseStatement | cst.BaseSuite | cst.Else | cst.ExceptHandler):
            definitions += _definitions(child)
    return definitions


class Scope:
    """A function or the whole module: its nodes, and the blocks around each of them."""

    def __init__(self, root: cst.CSTNode) -> None:
        self.root = root
        self.nodes: list[cst.CSTNode] = []
        self._parents: dict[int, cst.CSTNode] = {}
        todo = [root]
        while todo:
            node = todo.pop()
            self.nodes.append(node)
            children = list(_children(node))
            self._parents |= {id(child): node for child in children}
            todo += reversed(children)

    def enclosing(self, hits: Sequence[cst.CSTNode]) -> tuple[Block | cst.Module, int]:
        """Return the innermost block around all hits, and its first statement that holds one."""
        shared = None
        for level in zip(*map(self._blocks, hits), strict=False):
            if len({id(block) for block, _ in level}) > 1:
                break
            shared = level
        if shared is None:
            raise CountOffError("no block encloses all matches")
        block = shared[0][0]
        holding = {id(statement) for _, statement in shared}
        return block, next(i for i, s in enumerate(block.body) if id(s) in holding)

    def _blocks(self, node: cst.CSTNode) -> list[tuple[Block | cst.Module, cst.CSTNode]]:
        """Return the blocks around `node`, outermost first, each with its statement around it."""
        blocks: list[tuple[Block | cst.Module, cst.CSTNode]] = []
        while node is not self.root:
            parent = self._parents[id(node)]
            if isinstance(parent, Block | cst.Module):
                blocks.append((parent, node))
            node = parent
        return blocks[::-1]


def _children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield child nodes in source order, without layout (much faster than LibCST's `children`)."""
    for name in _meaning(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            yield value
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from (item for item in value if isinstance(item, cst.CSTNode))


@functools.cache
def _meaning(node_type: type[cst.CSTNode]) -> tuple[str, ...]:
    """Return the fields of a node that carry meaning."""
    names = (field.name for field in fields(node_type))
    return tuple(n for n in names if n not in _LAYOUT and not n.startswith("whitespace_"))


def _parse_pattern(text: str) -> cst.CSTNode:
    """Return an expression node, or the node of a one-line statement."""
    try:
        return cst.parse_expression(text)
    except cst.ParserSyntaxError:
        line = cst.parse_statement(text)
        assert isinstance(line, cst.SimpleStatementLine)
        return line.body[0]


def _same(pattern: object, node: object) -> bool:
    """Return whether structures, not layouts, are equal; a last argument `...` matches any rest."""
    if isinstance(pattern, cst.SimpleString) and isinstance(node, cst.SimpleString):
        return pattern.evaluated_value == node.evaluated_value
    if isinstance(pattern, cst.CSTNode):
        if type(pattern) is not type(node):
            return False
        return all(_same(getattr(pattern, n), getattr(node, n)) for n in _meaning(type(node)))
    if isinstance(pattern, Sequence) and not isinstance(pattern, str):
        if not isinstance(node, Sequence):
            return False
        rest = bool(pattern) and isinstance(getattr(pattern[-1], "value", None), cst.Ellipsis)
        head = pattern[:-1] if rest else pattern
        fits = len(node) >= len(head) if rest else len(node) == len(head)
        return fits and all(map(_same, head, node))
    return pattern == node
