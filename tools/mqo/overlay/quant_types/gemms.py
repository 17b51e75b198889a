"""The GEMMs of the methods that hold sites, and whose each is.

A *GEMM* is a call whose name says so (matmul, bmm, gemm, einsum, linear, mm, whatever prefix), an
`@`, or a call that takes the variable and two operands. Its site follows from the operands that its
names are, or are computed from: in `backward` the input makes it wgrad, else weight or grad_output
dgrad; in attention value or attention_probs makes it pv, else query or key qk; the linear `forward`
has fprop alone. Shapes, dtypes and `main_grad` count for nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal as Choice

from mqo.overlay.literals import VARIABLE
from mqo.overlay.quant_types.reach import Definition, Step, own_nodes

LAYERS = "megatron/core/tensor_parallel/layers.py"
ATTENTION = "megatron/core/transformer/dot_product_attention.py"


@dataclass(frozen=True)
class Method:
    """A method with GEMM sites, in source order.

    `operands` pairs sites with the names that tell them: the first pair that a GEMM meets is its.
    """

    path: str
    scope: str
    sites: tuple[str, ...]
    operands: tuple[tuple[str, frozenset[str]], ...]

    @property
    def names(self) -> frozenset[str]:
        """Every operand name of the method."""
        return frozenset().union(*(names for _, names in self.operands))


_INPUT = frozenset({"total_input", "input"})
_LINEAR = "LinearWithGradAccumulationAndAsyncCommunication"
METHODS = (
    Method(LAYERS, f"{_LINEAR}.forward", ("fprop",), (("fprop", _INPUT | {"weight"}),)),
    Method(
        LAYERS,
        f"{_LINEAR}.backward",
        ("dgrad", "wgrad"),
        (("wgrad", _INPUT), ("dgrad", frozenset({"grad_output", "weight"}))),
    ),
    Method(
        ATTENTION,
        "DotProductAttention.forward",
        ("qk", "pv"),
        (
            ("pv", frozenset({"value", "attention_probs"})),
            ("qk", frozenset({"query", "key", "matmul_input_buffer"})),
        ),
    ),
)
PATHS = tuple(dict.fromkeys(method.path for method in METHODS))
SITES = tuple(chain.from_iterable(method.sites for method in METHODS))

_NAME = re.compile(r"matmul|bmm|addmm|gemm|einsum|linear|(^|_)mm(_|$)")
_NO_DATA = {"shape", "size", "dtype", "device", "main_grad"}


@dataclass(frozen=True)
class Event:
    """A GEMM, a use of the variable, or a binding, which is a use that names its site.

    `reaching` is what the variable may hold there, and `carried` what it may have held when a
    GEMM's operands were computed from it. `site` is empty where no site is known.
    """

    kind: Choice["binding", "use", "gemm"]
    line: int
    site: str
    reaching: frozenset[Definition]
    carried: frozenset[Definition] = frozenset()


def events(method: Method, steps: Sequence[Step]) -> list[Event]:
    """What happens in `method`, in source order; a use gets the site of the GEMM behind it."""
    operands = _Operands(method, {})
    found: list[Event] = []
    for step in steps:
        operands = operands.at(step)
        found += _events_at(step, operands)
        operands = operands.after(step.statement)
    return _with_sites(method, found)


# An operand name of the method, or what set the variable.
_Origin = str | Definition


@dataclass(frozen=True)
class _Operands:
    """What each local name is computed from; nothing is followed through a GEMM."""

    method: Method
    sources: dict[str, frozenset[_Origin]]

    def at(self, step: Step) -> _Operands:
        """These, where the variable holds what reaches `step`."""
        return replace(self, sources=self.sources | {VARIABLE: step.reaching})

    def of(self, node: ast.AST) -> frozenset[_Origin]:
        """What `node` is computed from."""
        if isinstance(node, ast.Attribute) and node.attr in _NO_DATA:
            return frozenset()
        if isinstance(node, ast.Name):
            known = self.sources.get(node.id, frozenset())
            return known if node.id not in self.method.names else _types(known) | {node.id}
        return frozenset() if self.is_gemm(node) else self.of_parts(node)

    def of_parts(self, node: ast.AST) -> frozenset[_Origin]:
        """What the operands of a call or an operator are computed from."""
        return frozenset().union(*map(self.of, ast.iter_child_nodes(node)))

    def is_gemm(self, node: ast.AST) -> bool:
        """See the module."""
        match node:
            case ast.BinOp(op=ast.MatMult()):
                return True
            case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
                if _NAME.search(name):
                    return True
                typed = any(map(_is_variable, _arguments(node)))
                return typed and len(_names(self.of_parts(node))) > 1
        return False

    def after(self, statement: ast.stmt) -> _Operands:
        """These, and the names that `statement` assigns."""
        match statement:
            case ast.Assign(targets=targets, value=value):
                pass
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                targets = [target]
            case ast.AugAssign(target=target, value=value):
                targets = [target]
            case _:
                return self
        new = self.of(value)
        names = [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
        known = {name: self.sources.get(name, frozenset()) | new for name in names}
        return replace(self, sources=self.sources | known)

    def gemm(self, node: ast.AST, reaching: frozenset[Definition]) -> Event:
        """The event that a GEMM is."""
        origins = self.of_parts(node)
        names = _names(origins)
        mine = (site for site, of in self.method.operands if names & of)
        site = self.method.sites[0] if len(self.method.sites) == 1 else next(mine, "")
        return Event("gemm", node.lineno, site, reaching, _types(origins))


def _names(origins: frozenset[_Origin]) -> frozenset[str]:
    return frozenset(origin for origin in origins if isinstance(origin, str))


def _types(origins: frozenset[_Origin]) -> frozenset[Definition]:
    return frozenset(origin for origin in origins if isinstance(origin, Definition))


def _events_at(step: Step, operands: _Operands) -> Iterator[Event]:
    """A statement's bindings, its other uses, and then its GEMMs, which these are for."""
    nodes = list(own_nodes(step.statement))
    bindings = {node: site for node in nodes if (site := _bound_site(node))}
    bound = {name for call in bindings for name in _arguments(call)}
    for call, site in bindings.items():
        yield Event("binding", call.lineno, site, step.reaching)
    for node in nodes:
        if _is_variable(node) and isinstance(node.ctx, ast.Load) and node not in bound:
            yield Event("use", node.lineno, "", step.reaching)
    gemms = [node for node in nodes if node not in bindings and operands.is_gemm(node)]
    yield from (e for e in (operands.gemm(node, step.reaching) for node in gemms) if e.site)


def _with_sites(method: Method, events: Sequence[Event]) -> list[Event]:
    """Uses behind the last GEMM belong to the next site in the method's order, if there is one."""
    gemms = [event.site for event in events if event.kind == "gemm"]
    rest = method.sites[method.sites.index(gemms[-1]) + 1 :] if gemms else method.sites
    following = rest[0] if rest and (gemms or len(rest) == 1) else ""
    found = []
    for event in reversed(events):
        following = event.site if event.kind == "gemm" else following
        found.append(event if event.site else replace(event, site=following))
    return found[::-1]


def _bound_site(node: ast.AST) -> str:
    """The site that a binding `f('<site>', custom_quant_type, ...)` names, as our patches do."""
    match node:
        case ast.Call(args=[ast.Constant(value=str(site)), *_]) if site in SITES:
            return site if any(map(_is_variable, _arguments(node))) else ""
    return ""


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _is_variable(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == VARIABLE
