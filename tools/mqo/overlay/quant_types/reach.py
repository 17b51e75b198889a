"""Which assignments to the quant type variable reach which statement of a function.

A walk over a function's statements in source order: branches join, a `return` or `raise` ends its
branch, a loop's body may have run before. No statement is executed, so what *may* reach counts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from mqo.overlay.literals import VARIABLE
from mqo.overlay.quant_types.plain import Literal, Source


@dataclass(frozen=True)
class Definition:
    """What sets the variable, by its 1-based line; `literal` None when it is no plain literal."""

    line: int
    literal: Literal | None


@dataclass(frozen=True)
class Step:
    """A statement (a compound one without its blocks) and the definitions that reach it."""

    statement: ast.stmt
    reaching: frozenset[Definition]


# None: the code behind a return, which nothing reaches.
_State = frozenset[Definition] | None


def steps(function: ast.FunctionDef, source: Source) -> list[Step]:
    """The statements of `function` that can be reached, in source order."""
    passed = (a for a in ast.walk(function.args) if isinstance(a, ast.arg) and a.arg == VARIABLE)
    walk = _Walk(source)
    walk.block(function.body, frozenset(Definition(a.lineno, None) for a in passed))
    return walk.steps


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """A statement's nodes without those of the statements in its blocks."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt):
            yield from own_nodes(child)


@dataclass
class _Walk:
    source: Source
    steps: list[Step] = field(default_factory=list)

    def block(self, body: Sequence[ast.stmt], state: _State) -> _State:
        """The state behind `body`, when `state` holds before it."""
        for statement in body:
            state = self._statement(statement, state)
        return state

    def _statement(self, node: ast.stmt, state: _State) -> _State:
        if state is not None:
            self.steps.append(Step(node, state))
            definition = self._definition(node)
            state = frozenset({definition}) if definition else state
        match node:
            case ast.If():
                return _join(self.block(node.body, state), self.block(node.orelse, state))
            case ast.For() | ast.AsyncFor() | ast.While():
                looped = _join(state, self._anywhere(node.body))
                self.block(node.body, looped)
                return self.block(node.orelse, looped)
            case ast.Try() | ast.TryStar():
                return self._try(node, state)
            case ast.With() | ast.AsyncWith():
                return self.block(node.body, state)
            case ast.Match():
                return _join(state, *(self.block(case.body, state) for case in node.cases))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return self._nested(node, state)
            case ast.Return() | ast.Raise() | ast.Break() | ast.Continue():
                return None
        return state

    def _try(self, node: ast.Try | ast.TryStar, state: _State) -> _State:
        cut_off = _join(state, self._anywhere(node.body))
        through = self.block(node.body, state)
        ends = [self.block(handler.body, cut_off) for handler in node.handlers]
        ends.append(self.block(node.orelse, through))
        return self.block(node.finalbody, _join(*ends))

    def _nested(self, node: ast.FunctionDef | ast.AsyncFunctionDef, state: _State) -> _State:
        """A function inside: its uses count where it is defined, as if it were called there."""
        inside = list(ast.walk(node))
        for declared in inside:
            if isinstance(declared, ast.Nonlocal) and VARIABLE in declared.names:
                self.block(node.body, state)
                return _join(state, frozenset({Definition(declared.lineno, None)}))
        if not any(_sets_variable(n) or getattr(n, "arg", "") == VARIABLE for n in inside):
            self.block(node.body, state)
        return state

    def _anywhere(self, body: Sequence[ast.stmt]) -> frozenset[Definition]:
        """Every definition below `body`."""
        nodes = chain.from_iterable(map(ast.walk, body))
        found = (self._definition(node) for node in nodes if isinstance(node, ast.stmt))
        return frozenset(filter(None, found))

    def _definition(self, node: ast.stmt) -> Definition | None:
        """What a statement itself sets the variable to."""
        literal = self.source.literal(node)
        if literal:
            return Definition(literal.line, literal)
        lines = (getattr(n, "lineno", node.lineno) for n in own_nodes(node) if _sets_variable(n))
        return next((Definition(line, None) for line in lines), None)


def _join(*states: _State) -> _State:
    reached = [state for state in states if state is not None]
    return frozenset().union(*reached) if reached else None


def _sets_variable(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            return name == VARIABLE
        case ast.alias():
            return (node.asname or node.name) == VARIABLE
        case ast.Global() | ast.Nonlocal():
            return VARIABLE in node.names
        case ast.MatchMapping():
            return node.rest == VARIABLE
    return getattr(node, "name", "") == VARIABLE  # a def, a class, `except ... as`, a match
