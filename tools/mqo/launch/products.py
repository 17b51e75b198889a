"""Tabulate which matrix products of a training step are quantized, and their share of the FLOPs.

The facts come from Megatron-LM/tools/coverage.py (`mqo.launch.coverage` runs it), which runs a
tree's source once on meta tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, replace
from string import ascii_lowercase
from typing import Any

from pydantic.dataclasses import dataclass

from mqo.errors import RunError
from mqo.launch.libraries import LibraryQuantization
from mqo.matrix.tables import LINEAR_SITES, NONE, SITES
from mqo.recipes.layers import compact

BACKWARD = " backward"
AT_NONE = "its type is 'none': by the mode or recipe, --include or --exclude"
AUTOGRAD = "autograd computes it: this backward pass has no site"
NO_SITE = "no site wraps it"
EXPERT = ".local_experts."
EVEN_EXPERTS = "experts: tokens are assumed to be spread evenly; in a run the router decides"
FULL_SCORES = "attention: all s x s scores, masked ones too, as local attention computes them"


@dataclass(frozen=True)
class Product:
    """`calls` times `batch` products of [m, k] by [k, n] in one layer, `flops` in total.

    `gemm` is a site or an operation, with " backward" for its product in autograd.
    `quant_type` is the layer's type at that site, or None without a site. `plain` are the operands
    that a recipe or another library leaves unquantized.
    """

    layer: str
    gemm: str
    quant_type: str | None
    batch: int
    m: int
    n: int
    k: int
    calls: int
    flops: int
    plain: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """Return why the product is not quantized; '' if it is."""
        if self.quant_type == NONE:
            return AT_NONE
        if self.plain:
            return f"not quantized: {', '.join(self.plain)}"
        if self.quant_type is not None:
            return ""
        return AUTOGRAD if self.gemm.endswith(BACKWARD) else NO_SITE


@dataclass(frozen=True)
class Coverage:
    """The products of a micro-batch [sequences, tokens]; `lookups` are weights without products."""

    micro_batch: int
    sequence: int
    parameters: int
    products: tuple[Product, ...]
    lookups: tuple[str, ...]

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Coverage:
        """Return the coverage in the program's JSON; RunError if its products and FLOPs differ."""
        coverage = cls(**table)
        if coverage.flops != table["flops"]:
            raise RunError(
                f"The products add up to {coverage.flops} FLOPs",
                expected=f"{table['flops']}, as counted by the program",
            )
        return coverage

    @property
    def flops(self) -> int:
        """Return the FLOPs of all products of the micro-batch."""
        return sum(product.flops for product in self.products)

    @property
    def shares(self) -> dict[tuple[str, str], float]:
        """Return {(GEMM, type): its share of all FLOPs} of the quantized products."""
        totals: dict[tuple[str, str], int] = {}
        for product in self.products:
            if not product.reason:
                key = (product.gemm, str(product.quant_type))
                totals[key] = totals.get(key, 0) + product.flops
        return {key: flops / self.flops for key, flops in totals.items()}

    @property
    def share(self) -> float:
        """Return the quantized share of all FLOPs."""
        return sum(self.shares.values())

    def layers_by_site(self) -> dict[str, list[str]]:
        """Return {site: the names of its layers, in execution order}."""
        return {
            site: list(dict.fromkeys(p.layer for p in self.products if p.gemm == site))
            for site in SITES
        }

    def with_library(self, library: LibraryQuantization) -> Coverage:
        """Return a copy with what another library quantizes at the sites of linear layers."""
        products = (_by_library(product, library) for product in self.products)
        return replace(self, products=tuple(products))

    def share_of(self, sites: Collection[str], without: str) -> float:
        """Return the quantized share of the FLOPs at some sites, excluding the layer `without`."""
        here = [p for p in self.products if p.gemm in sites and p.layer != without]
        whole = sum(product.flops for product in here)
        return sum(product.flops for product in here if not product.reason) / max(1, whole)

    def summary(self) -> str:
        """Return the quantized share, in total and by GEMM and type, as one line."""
        parts = [f"{gemm} {t} {part:.1%}" for (gemm, t), part in self.shares.items()]
        details = f" ({', '.join(parts)})" if parts else ""
        return f"{self.share:.1%} of a step's matrix-product FLOPs quantized{details}"

    def as_table(self) -> dict[str, Any]:
        """Return all products for JSON, each with the reason if it is not quantized."""
        rows = [asdict(product) | {"reason": product.reason} for product in self.products]
        totals = {"flops": self.flops, "quantized_share": self.share}
        return asdict(self) | totals | {"products": rows}


def _by_library(product: Product, library: LibraryQuantization) -> Product:
    """Return the product with the library's format if the library quantizes an operand of it."""
    if product.gemm not in LINEAR_SITES["all"] or product.quant_type != NONE:
        return product
    plain = library.plain_operands(product.layer, product.gemm)
    if len(plain) > 1:
        return product
    return replace(product, quant_type=library.format, plain=plain)


@dataclass(frozen=True)
class Group:
    """Layers that differ only in their index; `products` are those of the first one."""

    pattern: str
    layers: int
    products: tuple[Product, ...]


def groups(products: Iterable[Product]) -> list[Group]:
    """Return the products by layer, in execution order; layers of equal products are one group."""
    layers: dict[str, list[Product]] = {}
    for product in products:
        layers.setdefault(product.layer, []).append(product)
    equal: dict[object, list[tuple[Product, ...]]] = {}
    for layer, rows in layers.items():
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", layer)
        # The backward passes of two layers may run in different orders.
        kind = frozenset(tuple(asdict(row).values())[1:] for row in rows)
        equal.setdefault((pattern, kind), []).append(tuple(rows))
    patterns = [key[0] for key in equal]  # type: ignore[index]
    result = []
    for pattern, alike in zip(patterns, equal.values(), strict=True):
        if patterns.count(pattern) > 1:  # the numbers of its layers distinguish the group
            pattern = ", ".join(compact([rows[0].layer for rows in alike]))
        result.append(Group(pattern, len(alike), alike[0]))
    return result


def coverage_lines(coverage: Coverage) -> list[str]:
    """Return the table, one block per group of layers, at most 80 columns wide."""
    marks: dict[str, str] = {}
    text = [
        f"{coverage.parameters:,} parameters; {coverage.flops / 1e12:,.2f} TFLOPs in the matrix "
        f"products of a",
        f"micro-batch of {coverage.micro_batch} x {coverage.sequence:,} tokens; "
        "[m, k] by [k, n], batch times:",
        "",
        f"  {'':14}{'batch':>6}{'m':>8}{'n':>8}{'k':>8}  {'type':12}{'share':>7}",
    ]
    for group in groups(coverage.products):
        count = f" x{group.layers}" if group.layers > 1 else ""
        text.append(group.pattern + count)
        for product in group.products:
            share = group.layers * product.flops / coverage.flops
            text.append(_row(product, share, marks))
    for name in coverage.lookups:
        text += [name, "  looks up rows: no matrix product"]
    text += ["", f"{coverage.share:.1%} of the FLOPs are quantized"]
    text += [f"  {gemm:14}{t:12}{part:>7.1%}" for (gemm, t), part in coverage.shares.items()]
    text += [f"({mark}) {reason}" for reason, mark in marks.items()]
    routed = any(EXPERT in product.layer for product in coverage.products)
    return [*text, FULL_SCORES, *([EVEN_EXPERTS] if routed else [])]


def _row(product: Product, share: float, marks: dict[str, str]) -> str:
    """Return the line of a product; a new reason gets the next mark."""
    gemm = product.gemm + (f" x{product.calls}" if product.calls > 1 else "")
    kind = product.quant_type or "-"
    if product.reason:
        kind += f" ({marks.setdefault(product.reason, ascii_lowercase[len(marks)])})"
    sizes = f"{product.batch:6}{product.m:8}{product.n:8}{product.k:8}"
    return f"  {gemm:14}{sizes}  {kind:12}{share:7.1%}"
