"""Apply site edits to a file with LibCST, preserving every byte outside of an edit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst
import libcst.matchers as m

from mqo.errors import DriftError
from mqo.overlay.drift import in_upstream, locations_text
from mqo.overlay.edits import (
    AddImport,
    AddParameters,
    Anchor,
    Edit,
    FileEdits,
    InsertBefore,
    PrependBody,
    ReplaceExpression,
    WrapOperands,
    covers,
)
from mqo.overlay.find import (
    DEFINITIONS,
    Block,
    CountOffError,
    Function,
    Scope,
    find_function,
    find_pattern,
)

Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
_FUTURE = m.SimpleStatementLine([m.ImportFrom(module=m.Name("__future__"))])


def rewrite(
    source: bytes, file: FileEdits, version: str, entry: str, *, pristine: bytes | None = None
) -> bytes:
    """Return `source` after the file's edits; raises DriftError if a pattern's count is off.

    `pristine` is upstream's content, if earlier entries changed it: errors give its lines.
    """
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
        except CountOffError as off:
            origin = source if pristine is None else pristine
            places = in_upstream(off.places, origin, source)
            near = None if off.near is None else in_upstream(off.near, origin, source)
            raise DriftError(
                f"{file.path}, in {edit.scope or 'the module'}: {off}"
                + locations_text(file.path, places, near),
                expected=f"the structure that patch '{entry}' expects of megatron-core {version}",
                help="`mqo status` shows which version the tree holds; "
                "for a new upstream version, revise the patch in patches/",
            ) from None
    return changes.module_with_changes().bytes


@dataclass(frozen=True)
class _Insertion:
    """Statements to insert into a block, which may take over the comments above that position."""

    at: int
    statements: tuple[Statement, ...]
    take_comments: bool = False


@dataclass(frozen=True)
class _Function:
    """The code of a function that a call gets; of a method, the object becomes an argument."""

    code: str
    was_method: bool

    def called_by(self, call: cst.Call) -> cst.Call:
        """Return a call of the function with the same arguments."""
        arguments = list(call.args)
        if self.was_method:
            comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            owner = cst.ensure_type(call.func, cst.Attribute).value
            arguments.insert(0, cst.Arg(owner, comma=comma))
        return call.with_changes(func=cst.parse_expression(self.code), args=arguments)


class _Changes:
    """The changes to one module: all are found in the parsed module, then made at once."""

    def __init__(self, module: cst.Module, version: str) -> None:
        self.module, self.version = module, version
        self.replaced: dict[int, cst.BaseExpression] = {}
        self.inserted: defaultdict[int, list[_Insertion]] = defaultdict(list)
        self.parameters: dict[int, Sequence[cst.Param]] = {}
        self.called: dict[int, _Function] = {}
        self.definitions: set[int] = set()
        self._scopes: dict[str, Scope] = {}

    def find(self, edit: Edit) -> None:
        """Note what `edit` changes, and where."""
        match edit:
            case AddImport():
                self._insert(self.module, _after_imports(self.module), edit.code)
            case PrependBody(scope=""):
                self._insert(self.module, _before_imports(self.module), edit.code)
            case PrependBody():
                function = self._scope(edit.scope).root
                assert isinstance(function, Function)
                if not isinstance(function.body, Block):
                    raise CountOffError(f"`{edit.scope}` has its body on the line of its `def`")
                has_docstring = function.get_docstring() is not None
                self._insert(function.body, int(has_docstring), edit.code)
            case AddParameters():
                self._add_parameters(edit)
            case InsertBefore():
                hits = self._hits(edit.scope, edit.anchors)
                block, at = self._scope(edit.scope).enclosing(hits)
                # The new code takes over the comments above its GEMM, so that it is next to it.
                self._insert(block, at, edit.code, take_comments=True)
            case WrapOperands():
                for hit in self._hits(edit.scope, edit.anchors):
                    for name, wrapper in edit.wrappers.items():
                        self._replace(_operand(hit, name), f"{wrapper}({name})")
                    if edit.function:
                        self._wrap_function(hit, edit)
            case ReplaceExpression():
                for hit in self._hits(edit.scope, (edit.anchor,)):
                    self._replace(hit, edit.code)

    def module_with_changes(self) -> cst.Module:
        """Return the module with all noted changes."""
        maker = _Maker(self)
        module = self.module.visit(maker)
        noted = len(self.replaced) + len(self.inserted) + len(self.parameters) + len(self.called)
        assert maker.done == noted, "a place was not in the module"
        return module

    def _insert(
        self, block: Block | cst.Module, at: int, code: str, *, take_comments: bool = False
    ) -> None:
        lines = cst.parse_module(code, self.module.config_for_parsing).body
        self.inserted[id(block)].append(_Insertion(at, tuple(lines), take_comments))

    def _add_parameters(self, edit: AddParameters) -> None:
        function = self._scope(edit.scope).root
        assert isinstance(function, Function)
        added = cst.ensure_type(cst.parse_statement(f"def f({edit.code}): ..."), Function).params
        here = function.params
        names = {p.name.value for p in (*here.posonly_params, *here.params, *here.kwonly_params)}
        known = sorted(names & {parameter.name.value for parameter in added.params})
        if known:
            raise CountOffError(f"function `{edit.scope}` already has a parameter `{known[0]}`")
        if not here.params:
            raise CountOffError(f"function `{edit.scope}` has no positional parameter")
        self.parameters[id(here)] = added.params

    def _wrap_function(self, hit: cst.CSTNode, edit: WrapOperands) -> None:
        call = cst.ensure_type(hit, cst.Call)
        names = {node.value for node in Scope(call.func).nodes if isinstance(node, cst.Name)}
        name, is_method = self.module.code_for_node(call.func), False
        if not names.isdisjoint(edit.wrappers):
            name = f"torch.{cst.ensure_type(call.func, cst.Attribute).attr.value}"
            is_method = True
        self.called[id(hit)] = _Function(f"{edit.function}({name})", is_method)

    def _replace(self, old: cst.CSTNode, code: str) -> None:
        self.replaced[id(old)] = cst.parse_expression(code, self.module.config_for_parsing)

    def _hits(self, scope: str, anchors: Sequence[Anchor]) -> list[cst.CSTNode]:
        hits: list[cst.CSTNode] = []
        for anchor in anchors:
            if not covers(anchor.versions, self.version):
                continue
            hits += find_pattern(self.module, self._scope(scope), anchor.pattern, anchor.count)
        if not hits:
            raise CountOffError(f"no form of `{anchors[0].pattern}` is known for this version")
        return hits

    def _scope(self, scope: str) -> Scope:
        if scope not in self._scopes:
            path = find_function(self.module, scope) if scope else [self.module]
            self._scopes[scope] = Scope(path[-1])
            nodes = [*path, *self._scopes[scope].nodes]
            self.definitions |= {id(node) for node in nodes if isinstance(node, DEFINITIONS)}
        return self._scopes[scope]


class _Maker(cst.CSTTransformer):
    """Replaces expressions and inserts statements into blocks, both identified by node.

    Classes and functions that are not in the `definitions` of `changes` are not visited.
    """

    def __init__(self, changes: _Changes) -> None:
        super().__init__()
        self.changes, self.done = changes, 0

    def on_visit(self, node: cst.CSTNode) -> bool:
        return not isinstance(node, DEFINITIONS) or id(node) in self.changes.definitions

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        key, changes = id(original_node), self.changes
        noted = (changes.replaced, changes.inserted, changes.parameters, changes.called)
        self.done += any(key in nodes for nodes in noted)
        if key in changes.replaced:
            return changes.replaced[key]
        if key in changes.inserted:
            return updated_node.with_changes(body=_body(updated_node, changes.inserted[key]))
        if key in changes.parameters:
            params = _after_last(updated_node.params, changes.parameters[key])
            return updated_node.with_changes(params=params)
        if key in changes.called:
            return changes.called[key].called_by(updated_node)
        return updated_node


def _body(block: Block | cst.Module, insertions: Sequence[_Insertion]) -> list[Any]:
    """Return the statements of `block` with the insertions, in order at each position."""
    body: list[Any] = []
    statements: list[Any] = [*block.body, None]
    for i, old in enumerate(statements):
        for insertion in (new for new in insertions if new.at == i):
            first, *rest = insertion.statements
            if insertion.take_comments and old is not None:
                first = first.with_changes(leading_lines=old.leading_lines)
                old = old.with_changes(leading_lines=())
            body += [first, *rest]
        if old is not None:
            body.append(old)
    return body


def _after_last(params: Sequence[cst.Param], added: Sequence[cst.Param]) -> list[cst.Param]:
    """Return `params` and then `added` in the same layout: on one line, or one per line."""
    *_, before, last = (None, *params)
    comma = before.comma if before else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    *others, final = (last, *added)
    others = [parameter.with_changes(comma=comma) for parameter in others]
    return [*params[:-1], *others, final.with_changes(comma=last.comma)]


def _operand(hit: cst.CSTNode, name: str) -> cst.Name:
    """Return the only occurrence of `name` in a match."""
    names = [node for node in Scope(hit).nodes if isinstance(node, cst.Name) and node.value == name]
    if len(names) != 1:
        raise CountOffError(f"operand `{name}` occurs {len(names)} times in a match")
    return names[0]


def _after_imports(module: cst.Module) -> int:
    """Return the index after the first run of imports, or else after the docstring."""
    has_docstring = module.get_docstring() is not None
    at = next((i for i, s in enumerate(module.body) if _is_import(s)), int(has_docstring))
    while at < len(module.body) and _is_import(module.body[at]):
        at += 1
    return at


def _before_imports(module: cst.Module) -> int:
    """Return the index after the docstring and the imports from `__future__`."""
    at = int(module.get_docstring() is not None)
    while at < len(module.body) and m.matches(module.body[at], _FUTURE):
        at += 1
    return at


def _is_import(statement: cst.CSTNode) -> bool:
    first = statement.body[0] if isinstance(statement, cst.SimpleStatementLine) else statement
    return isinstance(first, cst.Import | cst.ImportFrom)
