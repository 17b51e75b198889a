"""Options that quantize one subset of a model's GEMMs, to measure what each of them costs.

The subsets are the blocks of a model, its parts (a kind of layer in all blocks), its layers, the
GEMM sites, or single operands. Nothing else is quantized.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mqo.quant.formats import NONE, SITES, GemmSite
from mqo.quant.layer_rules import LayerRecipe, LayerRule
from mqo.quant.operand_table import PLAIN, OperandRow
from mqo.quant.quant_config import QuantConfig


def _block(layer: str) -> str:
    block = re.match(r".*?\blayers\.\d+\.", layer)
    return f"{block[0]}*" if block else layer


def _part(layer: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", layer)


# By kind: the pattern of excludes.py for the subset that a layer belongs to.
PATTERNS: Mapping[str, Callable[[str], str]] = {
    "block": _block,
    "part": _part,
    "layer": lambda layer: layer,
}
GEMM, OPERAND = "gemm", "operand"
KINDS = (*PATTERNS, GEMM, OPERAND)


@dataclass(frozen=True)
class Subset:
    """Some GEMMs of a model.

    name: a pattern of excludes.py, a site, or SITE.OPERAND. options: those that quantize only these
    GEMMs. layers: the names of the layers in which they are.
    """

    name: str
    options: QuantConfig
    layers: tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """What the quantization of a subset changes, with everything else unquantized.

    name, layers: those of the Subset. weights: the elements of its linear layers' weights. loss:
    the change of the mean loss in nats per token; loss_error: its standard error over the tokens.
    gradient: the norm of the change of the gradient, divided by the gradient's norm.
    """

    name: str
    layers: tuple[str, ...]
    weights: int
    loss: float
    loss_error: float
    gradient: float

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> Change:
        """Return the change in a program's result."""
        return cls(**{**table, "layers": tuple(table["layers"])})


def unquantized(options: QuantConfig) -> QuantConfig:
    """Return options that quantize nothing."""
    return replace(options, exclude=("*",))


def subsets(options: QuantConfig, kind: str, layers: Mapping[str, Collection[str]]) -> list[Subset]:
    """Return the subsets of one of KINDS that `options` quantize.

    `layers` are the names of a model's layers by their kind, linear or attention, in its order.
    `options` must not have `include`.
    """
    members = [
        Subset(name, only, quantized_layers(only, layers))
        for name, only in _options(options, kind, layers)
    ]
    return [subset for subset in members if subset.layers]


def quantized_layers(
    options: QuantConfig, layers: Mapping[str, Collection[str]]
) -> tuple[str, ...]:
    """Return the layers that have a quantized operand; `layers` as for `subsets`."""
    names: dict[str, None] = {}
    for site in _sites(options):
        for layer in layers.get(site.layer, ()):
            kinds = [
                options.operand_type(site.name, operand, layer, options.asked[site.name])
                for operand in (site.lhs, site.rhs)
            ]
            if {*kinds} != {NONE}:
                names[layer] = None
    return tuple(names)


def _options(
    options: QuantConfig, kind: str, layers: Mapping[str, Collection[str]]
) -> Iterator[tuple[str, QuantConfig]]:
    """Yield the name of each subset, with options that quantize only that."""
    if kind in PATTERNS:
        names = (PATTERNS[kind](layer) for of_kind in layers.values() for layer in of_kind)
        for pattern in dict.fromkeys(names):
            yield pattern, replace(options, include=(pattern,))
        return
    for site in _sites(options):
        only = replace(options, include=(f"{site.name}:*",))
        if kind == GEMM:
            yield site.name, only
            continue
        for operand, other in ((site.lhs, site.rhs), (site.rhs, site.lhs)):
            yield f"{site.name}.{operand}", _without(only, site, other)


def _sites(options: QuantConfig) -> list[GemmSite]:
    return [site for name, site in SITES.items() if options.asked.get(name, NONE) != NONE]


def _without(options: QuantConfig, site: GemmSite, operand: str) -> QuantConfig:
    """Return options that leave an operand of a site unquantized; its transform stays.

    A rule with a type becomes one with a recipe, because a type is for both operands.
    """
    name = f"{site.name}.{operand}"

    def plain(rows: Mapping[str, OperandRow]) -> dict[str, OperandRow]:
        row = rows.get(name, PLAIN)
        return {**rows, name: OperandRow(NONE, hadamard=row.hadamard, signs=row.signs)}

    types = {rule.quant_type for rule in options.rules if rule.quant_type} - {NONE}
    recipes = {
        **{key: replace(own, operands=plain(own.operands)) for key, own in options.recipes.items()},
        **{f"type {kind}": LayerRecipe({site.name: kind}, plain({})) for kind in types},
    }
    rules = tuple(
        LayerRule(rule.layers, recipe=f"type {rule.quant_type}", parts=rule.parts)
        if rule.quant_type in types
        else rule
        for rule in options.rules
    )
    return replace(options, operands=plain(options.operands), rules=rules, recipes=recipes)
