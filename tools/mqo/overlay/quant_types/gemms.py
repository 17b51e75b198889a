"""Find the GEMMs of a function, and the quant type literals that each one reads.

A *GEMM* is an `@`, a call whose name says so (matmul, bmm, gemm, einsum, linear, mm, whatever
prefix), or a call that takes a quant type and two operands and returns one value; and its result
flows on: into what the function returns, a gradient, or the operands of such a GEMM. A call whose
result is dropped, to log tensors say, is none. Its operands tell its site.

A GEMM *reads* a literal that reaches it as an argument, through a call that its operands passed
through, or through a condition that chose one of these. No statement is executed, so what *may*
reach counts: branches join, and a loop's body may have run before.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mqo.overlay.literals import VARIABLE, Literal, Source

PRODUCT = "<product>"  # an operand that is computed from the result of another GEMM
_GEMM = re.compile(r"matmul|bmm|addmm|gemm|einsum|linear|(^|_)mm(_|$)")
_NO_DATA = {"shape", "size", "dtype", "device", "main_grad"}
_CONDITIONS = "<conditions>"  # in a state: what chose the branch that a statement stands in

# The sites of a function, in the order of its GEMMs, each with the operands that tell it. A GEMM
# with operands of several is nobody's; where there is one site, all GEMMs are its.
Sites = Mapping[str, frozenset[str]]
_INPUT = frozenset({"total_input", "input"})
FORWARD: Sites = {"fprop": _INPUT | {"weight"}}
BACKWARD: Sites = {"dgrad": frozenset({"weight"}), "wgrad": _INPUT}
ATTEND: Sites = {
    "qk": frozenset({"query", "key", "matmul_input_buffer"}),
    "pv": frozenset({"value", "attention_probs", PRODUCT}),
}
SITES = (*FORWARD, *BACKWARD, *ATTEND)


@dataclass(frozen=True)
class Definition:
    """What sets the variable, by its 1-based line; `literal` None when it is no plain literal."""

    line: int
    literal: Literal | None


@dataclass(frozen=True)
class _Condition:
    """A quant type that the way through `branch` depends on."""

    definition: Definition
    branch: ast.AST


# What a value is computed from: operands' names, quant types, conditions, and nodes of GEMMs.
_Origins = frozenset[str | Definition | _Condition | ast.expr]
_NOTHING: _Origins = frozenset()
_State = dict[str, _Origins]  # of each name


@dataclass(frozen=True)
class Gemm:
    """A GEMM of a site, and what it reads.

    `bound` marks a call that names its site, `f('<site>', custom_quant_type)`, as our patches do.
    """

    line: int
    site: str
    reads: frozenset[Definition]
    bound: bool = False
    operands: _Origins = _NOTHING
    under: _Origins = _NOTHING


def find_gemms(function: ast.FunctionDef, sites: Sites, source: Source) -> list[Gemm]:
    """Return the bindings and GEMMs of `function` that have a site, in source order."""
    flow = _Flow(sites, _union(sites.values()) | {"grad_output"}, source, _odd(function))
    flow.used |= flow.function(function, {VARIABLE: flow.odd})
    waiting = [*flow.used & flow.found.keys()]
    while waiting:
        inner = (flow.found[waiting.pop()].operands & flow.found.keys()) - flow.used
        flow.used |= inner
        waiting += inner
    found = [gemm for node, gemm in flow.found.items() if gemm.bound or node in flow.used]
    return sorted((gemm for gemm in found if gemm.site), key=lambda gemm: gemm.line)


@dataclass
class _Flow:
    """A walk over the statements of a function in source order.

    `odd` is what sets the variable at no known statement, `found` holds the GEMMs and bindings,
    `used` what flows on, `passed` the states behind all statements. A state of None is code that
    nothing reaches.
    """

    sites: Sites
    names: frozenset[str]
    source: Source
    odd: _Origins
    found: dict[ast.AST, Gemm] = field(default_factory=dict)
    used: set[ast.AST] = field(default_factory=set)
    passed: list[_State] = field(default_factory=list)
    unpacked: set[ast.AST] = field(default_factory=set)
    returned: _Origins = _NOTHING

    def function(self, node: ast.FunctionDef, around: _State) -> _Origins:
        """Walk a function; return what its result is computed from."""
        arguments = [arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)]
        state = around | {
            arg.arg: _set_at(arg.lineno) if arg.arg == VARIABLE else _NOTHING for arg in arguments
        }
        outer, self.returned = self.returned, _NOTHING
        self.block(node.body, state)
        result, self.returned = self.returned, outer
        return result

    def block(self, body: Sequence[ast.stmt], state: _State | None) -> _State | None:
        """Return the state behind `body`, when `state` holds before it."""
        for statement in body:
            if state is None:
                break
            state = self.statement(statement, dict(state))
            self.passed += [state] if state is not None else []
        return state

    def anywhere(self, body: Sequence[ast.stmt], state: _State) -> tuple[_State | None, _State]:
        """Return the state behind `body`, and what may hold where it is left at any statement."""
        start = len(self.passed)
        end = self.block(body, state)
        before = {_CONDITIONS: state.get(_CONDITIONS, _NOTHING)}
        return end, _join(state, *self.passed[start:]) | before

    def statement(self, node: ast.stmt, state: _State) -> _State | None:
        """Return the state behind a statement; `state` may be changed."""
        if literal := self.source.literals.get(node):
            return state | {VARIABLE: self.odd | {Definition(literal.line, literal)}}
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self.assign(target, value, state)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self.assign(target, value, state)
            case ast.AugAssign(target=target, value=value):
                self.assign(target, ast.BinOp(target, node.op, value, lineno=node.lineno), state)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=changed, attr=name)) as call):
                origins = self.value(call, state)
                if name.endswith("_") or name in ("append", "extend"):
                    self.change(changed, origins, state)
            case ast.Return():
                self.returned |= self.value(node, state)
                return None
            case ast.Raise() | ast.Break() | ast.Continue():
                return None
            case ast.FunctionDef():
                self.change(ast.Name(node.name), self.function(node, state), state)
            case _:
                return self.compound(node, state)
        return state

    def compound(self, node: ast.stmt, state: _State) -> _State | None:
        """Return the state behind a statement that has blocks, or behind a plain one."""
        match node:
            case ast.If():
                return self.branches(node, node.test, [node.body, node.orelse], state)
            case ast.Match():
                blocks = [*(case.body for case in node.cases), []]
                return self.branches(node, node.subject, blocks, state)
            case ast.For() | ast.AsyncFor() | ast.While():
                if not isinstance(node, ast.While):
                    self.bind(node.target, self.value(node.iter, state), state)
                for _ in range(2):
                    _, state = self.anywhere(node.body, state)
                return self.block(node.orelse, state)
            case ast.Try() | ast.TryStar():
                end, cut_off = self.anywhere(node.body, state)
                ends = [self.block(handler.body, cut_off) for handler in node.handlers]
                after = _join(self.block(node.orelse, end), *ends)
                return self.block(node.finalbody, after)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    if item.optional_vars:
                        self.bind(item.optional_vars, self.value(item.context_expr, state), state)
                return self.block(node.body, state)
        self.value(node, state)
        return state

    def branches(
        self, node: ast.AST, test: ast.expr, blocks: list[list[ast.stmt]], state: _State
    ) -> _State | None:
        """Return the state behind branches; where one returns, the rest is chosen by `test`."""
        under = self.under(node, test, state)
        ends = [self.block(body, under) for body in blocks]
        after = _join(*ends)
        pairs = zip(blocks, ends, strict=True)
        returns = any(end is None and not isinstance(b[-1], ast.Raise) for b, end in pairs)
        if after is not None and not returns:
            after[_CONDITIONS] -= under[_CONDITIONS] - state.get(_CONDITIONS, _NOTHING)
        return after

    def under(self, node: ast.AST, test: ast.expr, state: _State) -> _State:
        """Return `state` below a branch that depends on the quant types in `test`."""
        chosen = frozenset(_Condition(d, node) for d in _types(self.value(test, state)))
        return state | {_CONDITIONS: state.get(_CONDITIONS, _NOTHING) | chosen}

    def assign(self, target: ast.expr, value: ast.expr, state: _State) -> None:
        """Bind what `value` is computed from."""
        if isinstance(target, ast.Tuple | ast.List):
            self.unpacked.add(value)
        self.bind(target, self.value(value, state), state)

    def bind(self, target: ast.expr, origins: _Origins, state: _State) -> None:
        """Note what a target holds from here on."""
        if not _nodes(origins):
            origins |= _types(state.get(_CONDITIONS, _NOTHING))
        match target:
            case ast.Name(id=name):
                computed = name == VARIABLE
                state[name] = self.odd | _set_at(target.lineno) if computed else origins
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for element in elements:
                    self.bind(element, origins, state)
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                state[f"{owner}.{name}"] = origins
                self.change(target, origins, state)
            case ast.Starred(value=inner):
                self.bind(inner, origins, state)
            case ast.Subscript():
                self.change(target, origins, state)

    def change(self, target: ast.expr, origins: _Origins, state: _State) -> None:
        """Note what goes into a target besides; what goes into a gradient flows on."""
        match target:
            case ast.Name(id=name):
                state[name] = state.get(name, _NOTHING) | origins
            case ast.Subscript(value=inner):
                self.change(inner, origins, state)
            case ast.Attribute(attr=name) if "grad" in name:
                self.used |= _nodes(origins)

    def value(self, node: ast.AST, state: _State) -> _Origins:
        """Return what an expression is computed from."""
        match node:
            case ast.Name(id=name):
                known = state.get(name, _NOTHING)
                return known if name not in self.names else known - _names(known) | {name}
            case ast.Attribute(attr=name) if name in _NO_DATA:
                return _NOTHING
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                own = frozenset({name}) & self.names
                return own or state.get(f"{owner}.{name}", self.value(node.value, state))
            case ast.Call(func=ast.Attribute(attr=name)) if name in _NO_DATA:
                return _NOTHING
            case ast.Call() | ast.BinOp(op=ast.MatMult()):
                return self.call(node, state)
            case ast.IfExp():
                state = self.under(node, node.test, state)
                origins = self.value(node.body, state) | self.value(node.orelse, state)
                return origins | self.chosen(origins, state)
            case ast.NamedExpr():
                self.assign(node.target, node.value, state)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
                for loop in node.generators:
                    self.bind(loop.target, self.value(loop.iter, state), state)
        return _union(self.value(child, state) for child in ast.iter_child_nodes(node))

    def call(self, node: ast.Call | ast.BinOp, state: _State) -> _Origins:
        """Return what a call or a product is computed from; that of a GEMM is the GEMM."""
        parts = [self.value(part, state) for part in _parts(node)]
        callee = _NOTHING
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Attribute):
            callee = self.value(node.func, state)
            callee = frozenset(_types(callee) | self.read_by(callee))
        origins = _union([callee, *parts])
        if site := _bound_site(node):
            self.found[node] = Gemm(node.lineno, site, state.get(VARIABLE, _NOTHING), bound=True)
            return origins
        typed = any(_types(part) and not _is_operand(part) for part in [callee, *parts])
        two = sum(map(_is_operand, parts)) > 1
        if not _is_named_gemm(node) and not (typed and two and node not in self.unpacked):
            return origins | self.chosen(origins, state)
        self.gemm(node, [callee, *parts], state)
        for changed in _outputs(node):
            self.change(changed, frozenset({node}), state)
        return frozenset({node})

    def gemm(self, node: ast.expr, parts: list[_Origins], state: _State) -> None:
        """Note a GEMM. What an earlier one read already counts where nothing else is read."""
        origins = _union(parts)
        within = any(isinstance(n, ast.Name) and n.id == VARIABLE for n in ast.walk(node))
        conditions = state.get(_CONDITIONS, _NOTHING)
        direct = _types(conditions) | (state.get(VARIABLE, _NOTHING) if within else _NOTHING)
        own = direct.union(*(_types(part) - self.read_by(part) for part in parts))
        names = _names(origins) | ({PRODUCT} if _nodes(origins) else set())
        told = [site for site, of in self.sites.items() if names & of or len(self.sites) == 1]
        site = told[0] if len(told) == 1 else ""
        new = Gemm(node.lineno, site, own or _types(origins), False, origins, conditions)
        old = self.found.get(node, new)
        self.found[node] = replace(
            new, reads=new.reads | old.reads, operands=origins | old.operands
        )

    def read_by(self, origins: _Origins) -> frozenset[Definition]:
        """Return what the GEMMs among `origins` read."""
        return _union(self.found[node].reads for node in _nodes(origins))

    def chosen(self, origins: _Origins, state: _State) -> frozenset[Definition]:
        """Return the types that chose a call, but for those that its operands' GEMMs are under."""
        known = _union(self.found[node].under for node in _nodes(origins))
        return _types(state.get(_CONDITIONS, _NOTHING) - known)


def _set_at(line: int) -> _Origins:
    return frozenset({Definition(line, None)})


def _union(sets: Iterable[frozenset]) -> frozenset:
    return frozenset().union(*sets)


def _join(*states: _State | None) -> _State | None:
    reached = [state for state in states if state is not None]
    keys = {_CONDITIONS}.union(*reached)
    joined = {key: _union(state.get(key, _NOTHING) for state in reached) for key in keys}
    return joined if reached else None


def _names(origins: _Origins) -> frozenset[str]:
    return frozenset(origin for origin in origins if isinstance(origin, str))


def _nodes(origins: _Origins) -> frozenset[ast.AST]:
    return frozenset(origin for origin in origins if isinstance(origin, ast.AST))


def _types(origins: _Origins) -> frozenset[Definition]:
    plain = (o.definition if isinstance(o, _Condition) else o for o in origins)
    return frozenset(origin for origin in plain if isinstance(origin, Definition))


def _is_operand(origins: _Origins) -> bool:
    return any(isinstance(origin, str | ast.AST) for origin in origins)


def _parts(node: ast.expr) -> list[ast.expr]:
    """The object of a method and the arguments, or the factors."""
    match node:
        case ast.Call():
            owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            return [*owner, *node.args, *(keyword.value for keyword in node.keywords)]
    return [node.left, node.right]


def _outputs(node: ast.expr) -> list[ast.expr]:
    """The arguments that a GEMM writes its result to."""
    out = [k.value for k in getattr(node, "keywords", []) if k.arg == "out"]
    grads = (n for n in _parts(node) if isinstance(n, ast.Attribute) and n.attr == "main_grad")
    return [*out, *grads]


def _is_named_gemm(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return bool(_GEMM.search(name))
    return isinstance(node, ast.BinOp)


def _bound_site(node: ast.expr) -> str:
    match node:
        case ast.Call(args=[ast.Constant(value=str(site)), *_]) if site in SITES:
            return site if any(getattr(part, "id", "") == VARIABLE for part in _parts(node)) else ""
    return ""


def _odd(function: ast.FunctionDef) -> _Origins:
    """What sets the variable by no assignment (an import, `del`, `nonlocal`, `except ... as`)."""
    for part in ast.walk(function):
        names = [getattr(part, name, None) for name in ("name", "asname", "rest")]
        names += getattr(part, "names", [])
        deleted = isinstance(part, ast.Name) and isinstance(part.ctx, ast.Del)
        names += [part.id] if deleted else []
        if VARIABLE in names:
            return _set_at(getattr(part, "lineno", function.lineno))
    return _NOTHING
