"""Quantize the linear layers of a model in PyTorch by a recipe."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeGuard

from torch import nn

from mqo.quant import excludes
from mqo.quant.attention import attention_modules, select
from mqo.quant.formats import (
    ATTENTION,
    ATTENTION_BACKWARD,
    LINEAR,
    NONE,
    check_choice,
    check_type,
    types,
)
from mqo.quant.layer_rules import LayerRule
from mqo.quant.linear import QuantLinear
from mqo.quant.plugin_rows import PluginRow
from mqo.quant.plugins import PLUGINS
from mqo.quant.quant_config import QuantConfig
from mqo.quant.quantization import ModelQuantization
from mqo.quant.recipe import Recipe
from mqo.quant.recipe_files import names
from mqo.quant.recipe_operands import LINEAR_SITES

# Last parts of the names of LM heads in models without `get_output_embeddings`.
_HEADS = ("lm_head", "output_layer")
# Modules whose matrices are not operands of a product of activations.
_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


def quantize_model(
    model: nn.Module,
    recipe: Recipe | str | os.PathLike[str],
    *,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    qk: str = NONE,
    pv: str = NONE,
    blocks: str | None = None,
    seed: int | None = None,
    cache_weights: bool = False,
    plugin_options: Mapping[str, Mapping[str, Any]] | None = None,
) -> ModelQuantization:
    """Quantize the linear layers of `model`, and its attention, in place.

    Each `torch.nn.Linear` becomes a `QuantLinear` with the same parameters and hooks. Call it
    before torch.compile, and before wrapping the model in DDP or FSDP.

    Args:
        model: any module; its own options are independent of those of other models.
        recipe: a recipe, the name of one ('nvfp4'), FILE.toml, or a type ('mxfp4') for all GEMMs of
            linear layers. Recipes, but not types, leave the LM head unquantized.
        include: patterns of the layers to quantize; `*` also matches dots.
        exclude: patterns of the layers to leave unquantized.
        qk, pv: the types of attention's two products, for models of transformers; see attention.py.
            'none' for those of the recipe, if it has any.
        blocks: the name of the list of transformer blocks, 'model.layers', for recipes that leave
            the first or last ones unquantized; None for the only such list.
        seed: the seed of stochastic rounding and random signs; None for the recipe's, or 0.
        cache_weights: whether to quantize a weight once per optimizer step, as runs with some
            recipes do. Code that changes weights in another way must then call `weights_changed`.
        plugin_options: {quantizer: {option: value}} of your own quantizers, {"mine": {"bits": 3}};
            they override those of a recipe.

    Returns:
        What the quantizers of this model share: options, step and records. `layers` has the names
        of the quantized layers.

    Raises:
        TypeError: `recipe` is neither a recipe nor a name.
        ValueError: a pattern matches no layer, a module of another class has matrices (name it in
            `exclude`), a name is unknown, the blocks are ambiguous, a layer with several names
            would be both quantized and not, or `plugin_options` has a quantizer that is not a
            type here, or another option than it declares. Nothing was changed then.
        FileNotFoundError: FILE.toml does not exist.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 4))
        >>> quantization = quantize_model(model, "mxfp4", exclude=["1"])
        >>> quantization.layers
        ('0',)
        >>> model(torch.ones(8, 32)).sum().backward()
    """
    for quant_type in (qk, pv):
        check_type(quant_type)
    chosen = _recipe(recipe)
    if backward := [s for s in ATTENTION_BACKWARD if getattr(chosen.types, s) != NONE]:
        raise ValueError(
            f"{chosen.label} has types for products of attention's backward pass "
            f"({', '.join(backward)}), which autograd computes here; valid: 'none' for them"
        )
    if chosen.types.of_attention:
        if {qk, pv} != {NONE}:
            raise ValueError(f"{chosen.label} has types for attention; valid: no qk and pv")
        qk, pv = chosen.types.qk, chosen.types.pv
    layers = dict(_layers(model))
    attention = attention_modules(model) if {qk, pv} != {NONE} else {}
    _check_patterns("include", include, [*layers, *attention])
    _check_patterns("exclude", exclude, [*layers, *attention])
    if blocks is not None:
        _blocks(model, blocks, layers)
    own = chosen.config()
    left_out = [name for name in attention if not _is_chosen(name, include, exclude)]
    if attention and len(left_out) == len(attention):
        raise ValueError("include and exclude leave out all attention; valid: qk and pv 'none'")
    options = replace(
        own,
        asked={**own.asked, "qk": qk, "pv": pv},
        rules=_rules(model, chosen, blocks, [*layers, *attention]),
        exclude=tuple(f"{ATTENTION}:{name}" for name in left_out),
        seed=own.seed if seed is None else seed,
        cache_weights=cache_weights,
        plugins=_plugins(chosen, (qk, pv), plugin_options or {}),
    )
    quantized = _linear(
        {
            name: module
            for name, module in layers.items()
            if _is_chosen(name, include, exclude) and _types(options, name) != {NONE}
        }
    )
    if not quantized:
        raise ValueError(f"{chosen.label} quantizes no layer of {type(model).__name__}")
    quantized = _without_aliases(quantized, layers)
    shared = ModelQuantization(options, quantized, attention.keys() - left_out)
    if {qk, pv} != {NONE}:
        select(model, shared)
    for name, module in quantized.items():
        QuantLinear.replace(module, shared, name)
    return shared


def _recipe(recipe: Recipe | str | os.PathLike[str]) -> Recipe:
    """Return the recipe, that of a name or of FILE.toml, or one of a type."""
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str | os.PathLike):
        raise TypeError(f"recipe is a {type(recipe).__name__}; valid: Recipe, a name or FILE.toml")
    name = os.fspath(recipe)
    if name.endswith(".toml") or name in names():
        return Recipe.load(name)
    named = tuple(kind for kind in types() if kind not in (NONE, "mixed"))
    if name not in named:
        valid = ", ".join(dict.fromkeys((*names(), *named)))
        raise ValueError(f"unknown recipe {name!r}; valid: {valid}, or FILE.toml")
    return Recipe.of_type(name)


def _plugins(
    recipe: Recipe, of_attention: Iterable[str], chosen: Mapping[str, Mapping[str, Any]]
) -> dict[str, PluginRow]:
    """Return the options of custom quantizers, of the recipe and of the caller."""
    known = sorted(recipe.own_types() | {*of_attention} & {*PLUGINS})
    options = dict(recipe.plugin_options)
    for name, values in chosen.items():
        check_choice("quantizer of plugin_options", name, known or (NONE,))
        if not isinstance(values, Mapping):
            raise ValueError(f"plugin_options of {name} are {values!r}; valid: {{option: value}}")
        PLUGINS[name].with_defaults(values)
        options[name] = {**options.get(name, {}), **values}
    return {name: PluginRow(options=values) for name, values in options.items()}


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) of linear layers, and of each matrix of other modules but lookups."""
    for name, module in model.named_modules(remove_duplicate=False):
        if _is_plain(module):
            yield name, module
        elif not isinstance(module, _LOOKUPS):
            for own, weight in module.named_parameters(name, recurse=False):
                if weight.dim() > 1:
                    yield own, module


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether QuantLinear can replace a module."""
    return type(module) is nn.Linear and "forward" not in vars(module)


def _check_patterns(argument: str, patterns: Sequence[str], layers: Iterable[str]) -> None:
    if isinstance(patterns, str):
        raise ValueError(f"{argument} is {patterns!r}; valid: a list of patterns")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise ValueError(f"the pattern '{pattern}' of {argument} matches no layer")


def _is_chosen(name: str, include: Iterable[str], exclude: Iterable[str]) -> bool:
    included, excluded = (
        any(fnmatchcase(name, pattern) for pattern in patterns) for patterns in (include, exclude)
    )
    return included and not excluded


def _types(options: QuantConfig, layer: str) -> set[str]:
    return {options.layer_type(site, layer, options.asked[site]) for site in LINEAR_SITES}


def _linear(layers: dict[str, nn.Module]) -> dict[str, nn.Linear]:
    """Return the layers if QuantLinear can replace all of them; else raise ValueError."""
    plain = {name: module for name, module in layers.items() if _is_plain(module)}
    if others := [f"{name} ({type(layers[name]).__name__})" for name in layers.keys() - plain]:
        raise ValueError(
            f"cannot quantize the matrices {', '.join(sorted(others))}; valid: those of "
            "torch.nn.Linear. Leave the others unquantized with exclude=[...]"
        )
    return plain


def _without_aliases(
    quantized: dict[str, nn.Linear], layers: dict[str, nn.Module]
) -> dict[str, nn.Linear]:
    """Return each layer under its first name; ValueError if not all its names are quantized."""
    first: dict[nn.Module, str] = {}
    for name, linear in quantized.items():
        first.setdefault(linear, name)
    for name, module in layers.items():
        if module in first and name not in quantized:
            raise ValueError(
                f"{first[module]} and {name} are the same layer, and only the first would be "
                "quantized; valid: patterns and a recipe that treat both alike"
            )
    return {name: quantized[name] for name in first.values()}


def _rules(
    model: nn.Module, recipe: Recipe, blocks: str | None, layers: Iterable[str]
) -> tuple[LayerRule, ...]:
    """Return the rules of the recipe for the layers of the model."""
    rules: list[LayerRule] = []
    for rule in recipe.rules:
        if rule.layers:
            _check_patterns("the recipe", [excludes.split(rule.layers)[1]], layers)
        path, count = _blocks(model, blocks, layers) if rule.is_of_ends else ("", 0)
        rules += rule.rows(recipe.scope, path, [[index] for index in range(count)])
    if not recipe.output_layer:
        rules += [LayerRule(f"{LINEAR}:{head}", NONE) for head in _heads(model)]
    return tuple(rules)


def _blocks(model: nn.Module, name: str | None, layers: Iterable[str]) -> tuple[str, int]:
    """Return the name and the length of the list of blocks."""
    lists = {
        path: len(module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    if name is None:
        outermost = {
            path: size
            for path, size in lists.items()
            if any(layer.startswith(f"{path}.") for layer in layers)
            and not any(path.startswith(f"{other}.") for other in lists)
        }
        if len(outermost) == 1:
            return next(iter(outermost.items()))
        candidates = ", ".join(outermost) or "none"
        raise ValueError(
            "the recipe has a rule for the first or last blocks, and the model has these lists of "
            f"modules: {candidates}. Name that of the blocks with blocks='NAME'"
        )
    if name not in lists:
        raise ValueError(f"unknown blocks {name!r}; valid: {', '.join(lists) or 'no list'}")
    return name, lists[name]


def _heads(model: nn.Module) -> Iterator[str]:
    """Yield the names of LM heads: transformers' output embeddings, and those of _HEADS."""
    outputs = set()
    for module in model.modules():
        get: Any = getattr(module, "get_output_embeddings", None)
        if get is not None:
            outputs.add(get())
    for name, module in model.named_modules(remove_duplicate=False):
        if module in outputs or name.rpartition(".")[2] in _HEADS:
            yield name
