"""Find the GEMMs of a function, and the quant types that each one reads.

A *GEMM* is an `@`, a call with a name such as matmul, bmm, gemm, einsum, linear or mm (with any
prefix), or a call that takes a quant type and two operands and returns one value. Its result must
reach the function's return value or a gradient. A call whose result is dropped, such as one that
logs tensors, is not a GEMM. The operands of a GEMM determine its site.

A GEMM *reads* a literal of the variable `custom_quant_type` that is its argument, an argument of a
call that computed one of its operands, or part of the condition of an `if` around such a call.
Statements are walked in source order. In branches and loops, an assignment adds to the possible
values of a name. A literal is valid to the end of its block; after that the type is unknown, and
GEMMs that read it cannot be set.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mqo.overlay.literals import VARIABLE, Literal, Source

# The sites of a function, each with the operands that identify it. A GEMM whose operands match
# several sites belongs to none; if there is only one site, all GEMMs belong to it.
Sites = Mapping[str, frozenset[str]]
PRODUCT = "<product>"  # an operand that is computed from the result of another GEMM
_INPUT = frozenset({"total_input", "input"})
FORWARD: Sites = {"fprop": _INPUT | {"weight"}}
BACKWARD: Sites = {"dgrad": frozenset({"weight"}), "wgrad": _INPUT}
ATTEND: Sites = {
    "qk": frozenset({"query", "key", "matmul_input_buffer"}),
    "pv": frozenset({"value", "attention_probs", PRODUCT}),
}
SITES = (*FORWARD, *BACKWARD, *ATTEND)

_OPERANDS = {"grad_output"}.union(*FORWARD.values(), *BACKWARD.values(), *ATTEND.values())
_NO_OPERANDS = {"shape", "size", "dtype", "device", "main_grad", "get_wgrad_tensor"}
_GEMM = re.compile(r"matmul|bmm|addmm|gemm|einsum|linear|(^|_)mm(_|$)")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPOUND = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Match, ast.Try, ast.TryStar)
_LEAVES = (ast.Return, ast.Break, ast.Continue)

Type = Literal | int  # what sets the variable: a literal, or the line number of another assignment


@dataclass(eq=False)
class Gemm:
    """A GEMM, its site ("" if its operands do not identify one), and the types that it reads."""

    line: int
    site: str = ""
    reads: frozenset[Type] = frozenset()


Origins = frozenset[str | Type | Gemm]  # what a value is computed from; operands by their names
_NOTHING: Origins = frozenset()


def find_gemms(function: ast.FunctionDef, sites: Sites, source: Source) -> list[Gemm]:
    """Return the GEMMs of `function` in source order."""
    walk = _Walk(sites, source)
    walk.block(function.body)
    hidden = _hidden_types(function)
    for gemm in walk.flowing:
        if gemm.reads:
            gemm.reads |= hidden
    return sorted(walk.flowing, key=lambda gemm: gemm.line)


@dataclass
class _Walk:
    """A walk over the statements of a function.

    `names` holds what variables and attributes are computed from, `flowing` the GEMMs whose results
    are used, `set_types` everything that has set the variable, with its line. `chosen` are the
    types that chose the branch of the current statement, `inside` the GEMMs of that branch.
    """

    sites: Sites
    source: Source
    names: dict[str, Origins] = field(default_factory=dict)
    gemms: dict[ast.expr, Gemm] = field(default_factory=dict)
    flowing: frozenset[Gemm] = frozenset()
    set_types: list[Type] = field(default_factory=list)
    depth: int = 0
    chosen: frozenset[Type] = frozenset()
    inside: frozenset[Gemm] = frozenset()

    def block(self, body: Sequence[ast.stmt]) -> None:
        """Walk statements."""
        for node in body:
            match node:
                case ast.With() | ast.AsyncWith():
                    self.simple(*node.items)
                    self.block(node.body)
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    name = ast.Name(node.name, lineno=node.lineno)
                    self.store(name, self.origins(node), node)
                case _ if isinstance(node, _COMPOUND):
                    self.compound(node)
                case _:
                    self.simple(node)

    def compound(self, node: ast.stmt) -> None:
        """Walk a statement with blocks, some of which may run, in loops several times."""
        parts = [node, *getattr(node, "handlers", []), *getattr(node, "cases", [])]
        blocks = [getattr(p, name, []) for p in parts for name in ("body", "orelse", "finalbody")]
        heads = [h for p in parts for h in ast.iter_child_nodes(p) if isinstance(h, ast.expr)]
        origins = self.simple(*heads)
        if isinstance(node, ast.For | ast.AsyncFor):
            self.store(node.target, origins, node)
        before, known = self.names.get(VARIABLE, _NOTHING), len(self.set_types)
        chosen = self.chosen
        self.depth += 1
        for body in blocks if isinstance(node, ast.If) else blocks * 2:
            with self.branch(origins):
                self.block(body)
                chosen |= self.chosen
            self.names[VARIABLE] = before.union(self.set_types[known:])
        self.depth -= 1
        if any(isinstance(part, _LEAVES) for part in ast.walk(node)):
            self.chosen = chosen  # it also chose what follows

    @contextlib.contextmanager
    def branch(self, tests: Origins) -> Iterator[None]:
        """Walk what `tests` choose."""
        chosen, inside = self.chosen, self.inside
        self.chosen, self.inside = chosen | _only(Type, tests), frozenset()
        yield
        self.chosen, self.inside = chosen, inside | self.inside

    def with_choice(self, origins: Origins) -> Origins:
        """Return `origins` and the types that chose them, except products of the same branch."""
        return origins if origins & self.inside else origins | self.chosen

    def simple(self, *nodes: ast.AST) -> Origins:
        """Walk statements without blocks; return what they are computed from."""
        origins = self.origins(*nodes)
        for part in (part for node in nodes for part in ast.walk(node)):
            targets = [*getattr(part, "targets", []), getattr(part, "target", None)]
            match part:
                case ast.Return():
                    self.flowing |= _only(Gemm, origins)
                case ast.withitem(optional_vars=target):
                    targets = [target]
                case ast.keyword(arg="out", value=target):
                    targets = [target]
                case ast.Attribute(attr="main_grad"):
                    targets = [part]
                case ast.Call(func=ast.Attribute(value=owner, attr=name)):
                    targets = [owner] if name.endswith("_") or name in ("append", "extend") else []
            for target in filter(None, targets):
                self.store(target, origins, part)
        return origins

    def origins(self, *nodes: ast.AST) -> Origins:
        """Return what a statement is computed from; its types may have chosen any GEMM in it."""
        origins = _union(map(self.value, nodes))
        for part in (part for node in nodes for part in ast.walk(node)):
            if part in self.gemms:
                self.gemms[part].reads |= _only(Type, origins)
        return origins

    def store(self, target: ast.expr, origins: Origins, setter: ast.AST) -> None:
        """Note what a target holds from here on; GEMMs stored in a gradient are used."""
        match target:
            case ast.Name(id=name) if name == VARIABLE:
                here = isinstance(setter, ast.stmt) and self.source.literals.get(setter)
                literal: Type = here or target.lineno
                self.set_types += [literal, target.lineno]
                self.names[name] = frozenset({literal})
            case ast.Name() | ast.Attribute():
                name = ast.unparse(target)
                replaces = isinstance(setter, ast.Assign | ast.AnnAssign) and not self.depth
                kept = _NOTHING if replaces else self.names.get(name, _NOTHING)
                self.names[name] = self.with_choice(origins) | kept
                if "grad" in getattr(target, "attr", ""):
                    self.flowing |= _only(Gemm, origins)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                for element in elements:
                    self.store(element, origins, setter)
            case ast.Starred(value=inner):
                self.store(inner, origins, setter)
            case ast.Subscript(value=inner):
                self.store(inner, origins, target)

    def value(self, node: ast.AST) -> Origins:
        """Return what an expression is computed from."""
        match node:
            case ast.Attribute(attr=name) | ast.Call(func=ast.Attribute(attr=name)) if (
                name in _NO_OPERANDS
            ):
                return _NOTHING
            case ast.Name(ctx=ast.Store()):
                return _NOTHING
            case ast.Name(id=name) | ast.Attribute(attr=name):
                known = self.names.get(ast.unparse(node), _NOTHING)
                if name in _OPERANDS:
                    return _only(Type | Gemm, known) | {name}
                if known or isinstance(node, ast.Name):
                    return known
            case ast.Call() | ast.BinOp(op=ast.MatMult()):
                return self.call(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                with self.branch(self.value(test)):
                    return self.with_choice(self.value(body) | self.value(orelse))
            case ast.Assign(targets=[ast.Tuple() | ast.List()], value=ast.Call() as call):
                return self.call(call, unpacked=True)
        return _union(map(self.value, ast.iter_child_nodes(node)))

    def call(self, node: ast.Call | ast.BinOp, *, unpacked: bool = False) -> Origins:
        """Return what a call or a product is computed from; for a GEMM, the GEMM."""
        values = [self.value(part) for part in _parts(node)]
        origins = _union(values)
        typed = any(_only(Type, value) and not _only(str | Gemm, value) for value in values)
        two = sum(bool(_only(str | Gemm, value)) for value in values) > 1
        if not _is_named_gemm(node) and not (typed and two and not unpacked):
            called = node.func if isinstance(node, ast.Call) else None
            method = isinstance(called, ast.Attribute) and _only(Gemm, values[0])
            return origins | (_NOTHING if method else self.chosen)  # such as `.to` of a product
        gemm = self.gemms.setdefault(node, Gemm(node.lineno))
        operands = _only(str, origins) | {PRODUCT for _ in _only(Gemm, origins)}
        told = [s for s, names in self.sites.items() if operands & names or len(self.sites) == 1]
        gemm.site = told[0] if len(told) == 1 else ""
        gemm.reads |= _only(Type, origins) | self.chosen
        self.inside |= {gemm}
        return _only(Gemm, origins) | {gemm}


def _union(sets: Iterable[frozenset]) -> frozenset:
    return _NOTHING.union(*sets)


def _only(kind: Any, origins: Origins) -> frozenset:
    return frozenset(origin for origin in origins if isinstance(origin, kind))


def _parts(node: ast.Call | ast.BinOp) -> list[ast.expr]:
    """Return the factors, or the function (for a method, the object) and the arguments."""
    match node:
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.Call(func=ast.Attribute(value=function)) | ast.Call(func=function):
            return [function, *node.args, *(keyword.value for keyword in node.keywords)]


def _is_named_gemm(node: ast.Call | ast.BinOp) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return bool(_GEMM.search(name))
    return isinstance(node, ast.BinOp)


def _hidden_types(function: ast.FunctionDef) -> frozenset[int]:
    """Return the lines that set the variable without assigning, or use it in an inner function."""
    lines = set()
    for part in ast.walk(function):
        names = [getattr(part, name, None) for name in ("name", "asname", "rest")]
        names += getattr(part, "names", [])
        if isinstance(part, ast.arg):
            names.append(part.arg)
        if isinstance(part, _SCOPES) and part is not function:
            names += [name.id for name in ast.walk(part) if isinstance(name, ast.Name)]
        if VARIABLE in names:
            lines.add(getattr(part, "lineno", 0))
    return frozenset(lines)
