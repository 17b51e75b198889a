"""Gives site edits their meaning: LibCST in, LibCST out, every byte outside an edit preserved."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import libcst as cst

from mqo.errors import DriftError
from mqo.overlay.edits import (
    AddImport,
    Anchor,
    Edit,
    FileEdits,
    InsertBefore,
    PrependBody,
    ReplaceExpression,
    WrapOperands,
)

Function = cst.FunctionDef
Block = cst.IndentedBlock
Statement = cst.BaseStatement
_DEFINITIONS = (cst.ClassDef, cst.FunctionDef)

# Fields that carry layout, not meaning.
_LAYOUT = {"lpar", "rpar", "comma", "semicolon", "leading_lines", "trailing_whitespace", "newline"}


def rewrite(source: bytes, file: FileEdits, version: str, entry: str) -> bytes:
    """`source` with the file's edits made; raises DriftError where a pattern's count is off."""
    try:
        module = cst.parse_module(source)
    except (cst.ParserSyntaxError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise DriftError(
            f"{file.path} does not parse as Python ({reason})",
            expected=f"the source of megatron-core {version}, which '{entry}' patches",
            help="`mqo vendor` fetches it again",
        ) from error
    changes = _Changes(module, version)
    for edit in file.edits:
        try:
            changes.find(edit)
        except _CountOffError as off:
            raise DriftError(
                f"{file.path}, in {edit.scope or 'the module'}: {off}",
                expected=f"the structure that patch '{entry}' knows from megatron-core {version}",
                help="`mqo status` shows which version the tree holds; "
                "a new upstream version needs the patch to be revised in patches/",
            ) from None
    return changes.made().bytes


class _CountOffError(Exception):
    """A pattern or scope occurs another number of times than it must."""


@dataclass(frozen=True)
class _Insertion:
    """Statements for a place in a block, perhaps with the comments that stand above that place."""

    at: int
    statements: tuple[Statement, ...]
    take_comments: bool = False


class _Changes:
    """What the edits change in one module: all found in it as it was parsed, then made at once."""

    def __init__(self, module: cst.Module, version: str) -> None:
        self.module, self.version = module, version
        self.replaced: dict[int, cst.BaseExpression] = {}
        self.inserted: defaultdict[int, list[_Insertion]] = defaultdict(list)
        self.definitions: set[int] = set()
        self._scopes: dict[str, _Scope] = {}

    def find(self, edit: Edit) -> None:
        """Note what `edit` changes, and where."""
        match edit:
            case AddImport():
                self._insert(self.module, _behind_imports(self.module), edit.code)
            case PrependBody():
                block = self._block(edit.scope)
                self._insert(block, 1 if _is_docstring(block.body[0]) else 0, edit.code)
            case InsertBefore():
                hits = self._hits(edit.scope, edit.anchors)
                block, at = self._scope(edit.scope).enclosing(hits)
                # The new code takes over the comments above its GEMM, to stand next to it.
                self._insert(block, at, edit.code, take_comments=True)
            case WrapOperands():
                for hit in self._hits(edit.scope, edit.anchors):
                    for name, wrapper in edit.wrappers.items():
                        self._replace(_operand(hit, name), f"{wrapper}({name})")
            case ReplaceExpression():
                for hit in self._hits(edit.scope, (edit.anchor,)):
                    self._replace(hit, edit.code)

    def made(self) -> cst.Module:
        """The module with everything that was noted."""
        maker = _Maker(self.replaced, self.inserted, self.definitions)
        module = self.module.visit(maker)
        assert maker.done == len(self.replaced) + len(self.inserted), (
            "a place was not in the module"
        )
        return module

    def _insert(
        self, block: Block | cst.Module, at: int, code: str, *, take_comments: bool = False
    ) -> None:
        lines = cst.parse_module(code, self.module.config_for_parsing).body
        self.inserted[id(block)].append(_Insertion(at, tuple(lines), take_comments))

    def _replace(self, old: cst.CSTNode, code: str) -> None:
        self.replaced[id(old)] = cst.parse_expression(code, self.module.config_for_parsing)

    def _hits(self, scope: str, anchors: Sequence[Anchor]) -> list[cst.CSTNode]:
        nodes = self._scope(scope).nodes
        hits: list[cst.CSTNode] = []
        for anchor in anchors:
            if not anchor.holds_in(self.version):
                continue
            pattern = _parse_pattern(anchor.pattern)
            found = [node for node in nodes if _same(pattern, node)]
            if len(found) != anchor.count:
                times = f"{len(found)} times instead of {anchor.count}"
                raise _CountOffError(f"`{anchor.pattern}` occurs {times}")
            hits += found
        if not hits:
            raise _CountOffError(f"no form of `{anchors[0].pattern}` is known for this version")
        return hits

    def _scope(self, scope: str) -> _Scope:
        if scope not in self._scopes:
            path = _find_function(self.module, scope) if scope else [self.module]
            self._scopes[scope] = _Scope(path[-1])
            nodes = [*path, *self._scopes[scope].nodes]
            self.definitions |= {id(node) for node in nodes if isinstance(node, _DEFINITIONS)}
        return self._scopes[scope]

    def _block(self, scope: str) -> Block:
        """The body of a function."""
        function = self._scope(scope).root
        if not isinstance(function, Function) or not isinstance(function.body, Block):
            raise _CountOffError(f"function `{scope}` has its body on the line of its `def`")
        return function.body


class _Maker(cst.CSTTransformer):
    """Puts new expressions in the place of old ones and new statements into blocks, by identity.

    Classes and functions other than `definitions` hold nothing to change, and are passed over.
    """

    def __init__(
        self,
        replaced: dict[int, cst.BaseExpression],
        inserted: dict[int, list[_Insertion]],
        definitions: set[int],
    ) -> None:
        super().__init__()
        self.replaced, self.inserted, self.definitions = replaced, inserted, definitions
        self.done = 0

    def on_visit(self, node: cst.CSTNode) -> bool:
        return not isinstance(node, _DEFINITIONS) or id(node) in self.definitions

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:
        key = id(original_node)
        if key in self.replaced:
            self.done += 1
            return self.replaced[key]
        if key in self.inserted:
            self.done += 1
            return updated_node.with_changes(body=_body(updated_node, self.inserted[key]))
        return updated_node


def _body(block: Block | cst.Module, insertions: Sequence[_Insertion]) -> list[cst.CSTNode]:
    """The statements of `block` with the insertions among them, those of one place in order."""
    body: list[cst.CSTNode] = []
    for i, old in enumerate([*block.body, None]):
        for insertion in (new for new in insertions if new.at == i):
            first, *rest = insertion.statements
            if insertion.take_comments and old is not None:
                first = first.with_changes(leading_lines=old.leading_lines)
                old = old.with_changes(leading_lines=())
            body += [first, *rest]
        if old is not None:
            body.append(old)
    return body


def _operand(hit: cst.CSTNode, name: str) -> cst.Name:
    """The one place where `name` stands in a match."""
    found = [
        node for node in _Scope(hit).nodes if isinstance(node, cst.Name) and node.value == name
    ]
    if len(found) != 1:
        raise _CountOffError(f"operand `{name}` occurs {len(found)} times in a match")
    return found[0]


def _behind_imports(module: cst.Module) -> int:
    """The place behind the module's first run of imports; without any, behind its docstring."""
    docstring = bool(module.body) and _is_docstring(module.body[0])
    at = next((i for i, s in enumerate(module.body) if _is_import(s)), int(docstring))
    while at < len(module.body) and _is_import(module.body[at]):
        at += 1
    return at


def _find_function(module: cst.Module, scope: str) -> list[cst.CSTNode]:
    """The one function at dotted path `scope`, e.g. "Class.method", and what it is defined in."""
    paths: list[list[cst.CSTNode]] = [[module]]
    for name in scope.split("."):
        paths = [[*p, d] for p in paths for d in _definitions(p[-1]) if d.name.value == name]
    paths = [path for path in paths if isinstance(path[-1], Function)]
    if len(paths) != 1:
        raise _CountOffError(f"function `{scope}` is defined {len(paths)} times instead of once")
    return paths[0]


def _definitions(node: cst.CSTNode) -> list[cst.ClassDef | Function]:
    """Classes and functions directly in `node`, those under `if` and `try` included."""
    found: list[cst.ClassDef | Function] = []
    for child in _children(node):
        if isinstance(child, _DEFINITIONS):
            found.append(child)
        elif isinstance(child, cst.BaseStatement | cst.BaseSuite | cst.Else | cst.ExceptHandler):
            found += _definitions(child)
    return found


class _Scope:
    """A function, or the whole module: its nodes, and the blocks that each of them stands in."""

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

    def enclosing(self, hits: Sequence[cst.CSTNode]) -> tuple[Block, int]:
        """The innermost block that encloses all hits, and its first statement that holds one."""
        shared = None
        for level in zip(*map(self._blocks, hits), strict=False):
            if len({id(block) for block, _ in level}) > 1:
                break
            shared = level
        if shared is None:
            raise _CountOffError("no block encloses all matches")
        block = shared[0][0]
        holding = {id(statement) for _, statement in shared}
        return block, next(i for i, s in enumerate(block.body) if id(s) in holding)

    def _blocks(self, node: cst.CSTNode) -> list[tuple[Block, cst.CSTNode]]:
        """The blocks around `node`, the outermost first, each with its statement that holds it."""
        found: list[tuple[Block, cst.CSTNode]] = []
        while node is not self.root:
            parent = self._parents[id(node)]
            if isinstance(parent, Block):
                found.append((parent, node))
            node = parent
        return found[::-1]


def _children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Child nodes in source order, layout apart (much faster than LibCST's own `children`)."""
    for name in _meaning(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            yield value
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from (item for item in value if isinstance(item, cst.CSTNode))


@functools.cache
def _meaning(node_type: type[cst.CSTNode]) -> tuple[str, ...]:
    """The fields of a node that carry meaning."""
    names = (field.name for field in fields(node_type))
    return tuple(n for n in names if n not in _LAYOUT and not n.startswith("whitespace_"))


def _parse_pattern(text: str) -> cst.CSTNode:
    """An expression node, or the node of a one-line statement."""
    try:
        return cst.parse_expression(text)
    except cst.ParserSyntaxError:
        line = cst.parse_statement(text)
        assert isinstance(line, cst.SimpleStatementLine)
        return line.body[0]


def _same(pattern: object, node: object) -> bool:
    """Structural equality, blind to layout; `...` as last call argument takes any rest."""
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


def _is_import(statement: Statement | cst.SimpleStatementLine) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and isinstance(
        statement.body[0], cst.Import | cst.ImportFrom
    )


def _is_docstring(statement: cst.CSTNode) -> bool:
    return (
        isinstance(statement, cst.SimpleStatementLine)
        and isinstance(statement.body[0], cst.Expr)
        and isinstance(statement.body[0].value, cst.SimpleString | cst.ConcatenatedString)
    )
