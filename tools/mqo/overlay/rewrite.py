"""Gives site edits their meaning: LibCST in, LibCST out, every byte outside an edit preserved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TypeVar

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
NodeT = TypeVar("NodeT", bound=cst.CSTNode)

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
    for edit in file.edits:
        try:
            module = _Rewriter(module, version).run(edit)
        except _CountOffError as off:
            raise DriftError(
                f"{file.path}, in {edit.scope or 'the module'}: {off}",
                expected=f"the structure that patch '{entry}' knows from megatron-core {version}",
                help="`mqo status` shows which version the tree holds; "
                "a new upstream version needs the patch to be revised in patches/",
            ) from None
    return module.bytes


class _CountOffError(Exception):
    """A pattern or scope occurs another number of times than it must."""


class _Rewriter:
    """One edit on one module."""

    def __init__(self, module: cst.Module, version: str) -> None:
        self.module, self.version = module, version

    def run(self, edit: Edit) -> cst.Module:
        match edit:
            case AddImport():
                return self._add_import(edit)
            case PrependBody():
                return self._prepend(edit)
            case InsertBefore():
                return self._insert(edit)
            case WrapOperands():
                return self._wrap(edit)
            case ReplaceExpression():
                new = cst.parse_expression(edit.code)
                return self._replace(dict.fromkeys(self._hits(edit.scope, (edit.anchor,)), new))
        raise TypeError(f"no meaning for {type(edit).__name__}")

    def _add_import(self, edit: AddImport) -> cst.Module:
        body = list(self.module.body)
        at = next((i for i, s in enumerate(body) if _is_import(s)), 0)
        while at < len(body) and _is_import(body[at]):
            at += 1
        return self.module.with_changes(body=[*body[:at], *self._parse(edit.code), *body[at:]])

    def _prepend(self, edit: PrependBody) -> cst.Module:
        block = find_function(self.module, edit.scope).body
        assert isinstance(block, Block)
        at = 1 if _is_docstring(block.body[0]) else 0
        new = [*block.body[:at], *self._parse(edit.code), *block.body[at:]]
        return self._replace({block: block.with_changes(body=new)})

    def _insert(self, edit: InsertBefore) -> cst.Module:
        hits = self._hits(edit.scope, edit.anchors)
        block = find_function(self.module, edit.scope).body
        assert isinstance(block, Block)
        block, at = _enclosing(block, hits)
        anchor = block.body[at]
        first, *rest = self._parse(edit.code)
        # Comments above the anchor move above the new code, so that it stands next to its GEMM.
        first = first.with_changes(leading_lines=anchor.leading_lines)  # type: ignore[attr-defined]
        body = [*block.body[:at], first, *rest, anchor.with_changes(leading_lines=())]
        return self._replace({block: block.with_changes(body=[*body, *block.body[at + 1 :]])})

    def _wrap(self, edit: WrapOperands) -> cst.Module:
        replacements: dict[cst.CSTNode, cst.CSTNode] = {}
        for hit in self._hits(edit.scope, edit.anchors):
            for name, wrapper in edit.wrappers.items():
                found = [n for n in _walk(hit) if isinstance(n, cst.Name) and n.value == name]
                if len(found) != 1:
                    raise _CountOffError(f"operand `{name}` occurs {len(found)} times in a match")
                replacements[found[0]] = cst.parse_expression(f"{wrapper}({name})")
        return self._replace(replacements)

    def _replace(self, replacements: Mapping[cst.CSTNode, cst.CSTNode]) -> cst.Module:
        """All at once: a visit makes every node anew, and nodes found before would be lost."""
        transformer = _Replacer(replacements)
        module = self.module.visit(transformer)
        assert transformer.done == len(replacements), "a matched node was not in the module"
        return module

    def _hits(self, scope: str, anchors: Sequence[Anchor]) -> list[cst.CSTNode]:
        root = find_function(self.module, scope) if scope else self.module
        nodes = list(_walk(root))
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
        return hits

    def _parse(self, code: str) -> list[Statement]:
        config = self.module.config_for_parsing
        return list(cst.parse_module(code, config).body)  # type: ignore[arg-type]


class _Replacer(cst.CSTTransformer):
    """Puts new nodes in the place of old ones, by identity."""

    def __init__(self, replacements: Mapping[cst.CSTNode, cst.CSTNode]) -> None:
        super().__init__()
        self.new = {id(old): new for old, new in replacements.items()}
        self.done = 0

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:
        new = self.new.get(id(original_node))
        self.done += new is not None
        return updated_node if new is None else new


def find_function(module: cst.Module, scope: str) -> Function:
    """The one function at dotted path `scope`, e.g. "Class.method"."""
    level: list[cst.CSTNode] = [module]
    for name in scope.split("."):
        level = [d for node in level for d in _definitions(node) if d.name.value == name]
    if len(level) != 1 or not isinstance(level[0], Function):
        raise _CountOffError(f"function `{scope}` is defined {len(level)} times instead of once")
    return level[0]


def _definitions(node: cst.CSTNode) -> list[cst.ClassDef | Function]:
    """Classes and functions directly in `node`, those under `if` and `try` included."""
    found: list[cst.ClassDef | Function] = []
    for child in node.children:
        if isinstance(child, cst.ClassDef | Function):
            found.append(child)
        elif isinstance(child, cst.BaseStatement | cst.BaseSuite | cst.Else | cst.ExceptHandler):
            found += _definitions(child)
    return found


def _enclosing(block: Block, hits: Sequence[cst.CSTNode]) -> tuple[Block, int]:
    """The innermost block that encloses all hits, and its first statement that holds one."""
    wanted = set(map(id, hits))
    holding = [i for i, s in enumerate(block.body) if wanted & {id(n) for n in _walk(s)}]
    if len(holding) == 1:
        for inner in _walk(block.body[holding[0]]):
            if isinstance(inner, Block) and wanted <= {id(n) for n in _walk(inner)}:
                return _enclosing(inner, hits)
    return block, holding[0]


def _walk(node: cst.CSTNode) -> Iterable[cst.CSTNode]:
    yield node
    for child in node.children:
        yield from _walk(child)


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
        names = [f.name for f in fields(pattern) if not _is_layout(f.name)]
        return all(_same(getattr(pattern, n), getattr(node, n)) for n in names)
    if isinstance(pattern, Sequence) and not isinstance(pattern, str):
        if not isinstance(node, Sequence):
            return False
        rest = bool(pattern) and isinstance(getattr(pattern[-1], "value", None), cst.Ellipsis)
        head = pattern[:-1] if rest else pattern
        fits = len(node) >= len(head) if rest else len(node) == len(head)
        return fits and all(map(_same, head, node))
    return pattern == node


def _is_layout(name: str) -> bool:
    return name in _LAYOUT or name.startswith("whitespace_")


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
