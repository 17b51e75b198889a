"""Refuse options that change nothing in a run.

tools/mqo/quant/table.py resolves a run's options. This module turns its findings into errors that
name the option, what reads it, and what this run quantizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mqo.errors import MqoError
from mqo.launch import engine
from mqo.launch.config import RunConfig
from mqo.launch.flags import length
from mqo.launch.options import OPTIONS, quant_toml
from mqo.matrix.tables import LINEAR_SITES, NONE
from mqo.quant import formats
from mqo.quant import table as option_table
from mqo.quant.config import parse

Layers = option_table.Layers


# The options with patterns of layers, and why a pattern changes nothing.
PATTERNS = {
    "exclude": "its layers are unquantized without it",
    "include": "the same layers are quantized without it",
}


class NoEffectError(MqoError):
    """An option changes nothing in this run."""


def resolved_config(config: RunConfig, types: Mapping[str, str]) -> Any:
    """Return the tree's QuantConfig of a run whose sites have these types."""
    return _parsed(config.quant_toml(dict(types)))


def quant_config(
    types: Mapping[str, str], options: Mapping[str, Any], schedule: Iterable[str] = ()
) -> Any:
    """Return the tree's QuantConfig of a mode's types with these options."""
    return _parsed(quant_toml(types, options, schedule))


def unread_options(
    config: Any, names: Iterable[str], layers: Layers | None = None, steps: int | None = None
) -> list[str]:
    """Return the options among `names` that change no entry of a QuantConfig's table."""
    acting = [name for name in names if OPTIONS[name].table in option_table.READ_TABLES]
    return [name for name in acting if option_table.unread(config, name, layers, steps)]


def differing_lines(config: RunConfig, types: Mapping[str, str], layers: Layers) -> list[str]:
    """Return one line per quantization of operands at the sites whose layers differ."""
    ways: dict[tuple[str, int, int], list[str]] = {}
    for row in option_table.differing(resolved_config(config, types), layers):
        key = (row.words, row.count, row.total)
        ways.setdefault(key, []).append(f"{row.site}.{row.operand}")
    return [
        f"{words} in {count} of {total} layers: {', '.join(operands)}"
        for (words, count, total), operands in ways.items()
    ]


def check_effects(
    config: RunConfig, types: Mapping[str, str], layers: Layers | None = None
) -> None:
    """Raise NoEffectError for the first option that changes nothing in this run.

    Args:
        config: the run.
        types: the types of its sites: the mode's, or those in the tree.
        layers: the model's layers by site. If None, patterns are checked only by their sites.
    """
    for fault, expected in _faults(config, types, layers):
        raise NoEffectError(
            fault,
            expected=expected,
            help="Leave it out; --dry-run shows what the run quantizes",
        )


def _faults(
    config: RunConfig, types: Mapping[str, str], layers: Layers | None
) -> Iterator[tuple[str, str]]:
    """Yield (what has no effect, what would have an effect)."""
    quant = config.quantization
    steps = length(config.experiment).steps
    resolved = resolved_config(config, types)
    table = option_table.entries(resolved, layers, steps)
    has = _kinds(table)
    linear = {types.get(site, NONE) for site in LINEAR_SITES["all"]}
    if quant.gemms == "all" and quant.recipe is None and linear == {NONE}:
        yield (
            f"--gemms all changes nothing: {quant.mode} quantizes no linear layer; this run has "
            f"{has}",
            "a mode that quantizes linear layers",
        )
    attention = {types.get(site, NONE) for site in ("qk", "pv")}
    if quant.attention_gemms == "all" and attention == {NONE}:
        yield (
            f"--attention-gemms all changes nothing: {quant.mode} quantizes no product of "
            f"attention; this run has {has}",
            "a mode that quantizes attention",
        )
    for site in option_table.emptied_sites(resolved, layers or {}):
        yield (
            f"The type of {site} changes nothing: --include and --exclude leave out all its layers",
            "a layer to quantize, or a mode without this site",
        )
    for name in unread_options(resolved, _given(config), layers, steps):
        flag, value = OPTIONS[name].flag, getattr(resolved, name)
        shown = flag if value is True else f"{flag} {_words(value)}"
        yield (
            f"{shown} changes nothing: no operand of this run reads it; this run has {has}",
            _readers(name, value),
        )
    for site in option_table.unread_schedules(resolved, steps):
        yield (
            f"The schedule of {site} changes nothing: it has the same type in all {steps} steps",
            "a second type that begins before the last step",
        )
    yield from _pattern_faults(config, resolved, layers)
    if quant.recipe is not None and quant.recipe.own:
        for operand, key in option_table.unread_rows(resolved, layers):
            yield (
                f"{key} of operands.{operand} in the recipe {quant.recipe.name} changes nothing: "
                f"this run has {has}",
                "only keys that the operand's format reads",
            )


def _pattern_faults(
    config: RunConfig, resolved: Any, layers: Layers | None
) -> Iterator[tuple[str, str]]:
    for name, why in PATTERNS.items():
        for pattern in option_table.unread_patterns(resolved, name, layers):
            reason = "no GEMM at its sites is quantized" if layers is None else why
            yield f"--{name} {pattern} changes nothing: {reason}", "layers whose type it changes"
    if layers is None:
        return
    recipe = config.quantization.recipe
    if recipe is None or not recipe.own:
        return
    for rule in recipe.rules:
        if not rule.layers:
            continue
        rows = [*rule.rows(recipe.scope)]
        others = tuple(other for other in resolved.rules if other not in rows)
        if not option_table.changes_layers(resolved, layers, rules=others):
            yield (
                f"The rule for '{rule.layers}' in the recipe {recipe.name} changes nothing: an "
                "exclude or an earlier rule covers its layers",
                "a rule that changes the type of a layer",
            )


def _given(config: RunConfig) -> Iterator[str]:
    """Yield the options that a user or a recipe chose."""
    for name in (*config.quantization.options, *config.recording.options):
        # The launcher turns it on for Transformer Engine's layers, which cache weights themselves.
        is_automatic = name == "cache_weights" and engine.is_asked(config.experiment.extra_flags)
        if not is_automatic:
            yield name


def _kinds(table: Iterable[Any]) -> str:
    """Return the types in a table by site: 'mxfp8 at fprop and qk, ...'."""
    sites_by_type: dict[str, set[str]] = {}
    for entry in table:
        sites_by_type.setdefault(entry.operand_spec.spec.quant_type, set()).add(entry.site)
    parts = [
        f"{kind} at {_listed([s for s in formats.SITES if s in sites], 'and')}"
        for kind, sites in sorted(sites_by_type.items())
        if kind != NONE
    ]
    return ", ".join(parts) or "no quantized operand"


def _readers(name: str, value: Any) -> str:
    """Return the types and sites that read a value of an option."""
    kinds, sites, is_random = option_table.readers(name, value)
    types = "any type" if len(kinds) == len(formats.FORMATS) else _listed(kinds)
    where = "any site" if len(sites) == len(formats.SITES) else _listed(sites)
    drawn = ", with stochastic rounding or random signs" if is_random else ""
    return f"{types} at {where}{drawn}"


def _listed(names: Iterable[str], last_word: str = "or") -> str:
    *first, last = names
    return f"{', '.join(first)} {last_word} {last}" if first else last


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _parsed(text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise MqoError(str(error)) from None
