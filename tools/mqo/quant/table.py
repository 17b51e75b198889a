"""Resolve a run's options into a table of how each operand of each site is quantized.

An option that does not change the table has no effect, and the launcher refuses it. This module
needs only the standard library: `mqo`, which does not import torch, loads it by path.
"""

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mqo.quant import excludes
from mqo.quant.formats import FORMATS, NONE, SCALE_RULES_OF, SITES, GemmSite
from mqo.quant.layer_rules import Assigned
from mqo.quant.operand_table import PLAIN, WGRAD
from mqo.quant.options import OPTIONS
from mqo.quant.plugins import registrations
from mqo.quant.quant_config import QuantConfig
from mqo.quant.spec import OperandSpec

Layers = Mapping[str, Collection[str]]
"""The names of a model's layers, by site."""

READ_TABLES = ("quantizer", "record")
"""The tables of quant.toml whose options have their effect through an entry."""


@dataclass(frozen=True)
class Entry:
    """The quantization of an operand in the layers and the phase of training with these types.

    Attributes:
        site: a name in SITES.
        operand: the name of one of its operands.
        site_type: the site's type in this phase of training.
        assigned: the type or the recipe that a rule gives the layers; None if they have the site's.
        operand_spec: the format and its choices.
        seed: the base of the seeds, None without random draws.
        draws_once: whether all micro-batches of a step share one draw, or one quantized weight.
        packed: whether the layer saves the operand as codes for its backward pass.
        unnormalized: whether probabilities are quantized before they are normalized.
        recorded: the interval of the records, the dumped iterations, and whether the noise of the
            product is measured.
    """

    site: str
    operand: str
    site_type: str
    assigned: Assigned | None
    operand_spec: OperandSpec
    seed: int | None
    draws_once: bool
    packed: bool
    unnormalized: bool
    recorded: tuple[int, tuple[int, ...], bool]

    @property
    def choices(self) -> str:
        """The format, tile and rounding, and all other choices that are not defaults."""
        spec = self.operand_spec.spec
        words = [spec.quant_type]
        if self.operand_spec.is_quantized:
            words += [spec.tile_text, str(spec.rounding)]
            words += [spec.rule_text] if spec.rule_text else []
            words += [f"{name}={value}" for name, value in spec.changed_options.items()]
        if self.operand_spec.source:
            words[0] = f"{words[0]} of {self.operand_spec.source}"
        if turned := self.operand_spec.hadamard:
            words.append(f"hadamard {turned.points} {turned.signs}")
        words += [] if self.operand_spec.gain == 1.0 else [f"gain {self.operand_spec.gain:g}"]
        return " ".join(words)


def entries(
    config: QuantConfig, layers: Layers | None = None, steps: int | None = None
) -> frozenset[Entry]:
    """Return the entries of a run that quantize or transform an operand.

    Args:
        config: the options, and the types of the source.
        layers: the model's layers; None if they are not known, so that any rule may match.
        steps: the length of the training, to leave out phases that never begin.

    Raises:
        ValueError: no row gives the type of an operand of a 'mixed' site.
    """
    result = set()
    for site in SITES.values():
        for site_type, assigned in _types(config, site, layers, steps):
            for operand in (site.lhs, site.rhs):
                entry = _entry(config, site, operand, site_type, assigned)
                if entry.operand_spec.changes:
                    result.add(entry)
    return frozenset(result)


@dataclass(frozen=True)
class Choices:
    """How `count` of the `total` layers of a site quantize an operand, in words."""

    site: str
    operand: str
    words: str
    count: int
    total: int


def differing(config: QuantConfig, layers: Layers) -> list[Choices]:
    """Return the choices of operands at sites where rules give quantized layers different types."""
    choices = []
    for site in SITES.values():
        site_type, names = config.phases(site.name)[0].quant_type, layers.get(site.name, ())
        ways = Counter(config.assigned(site.name, name, site_type) for name in names)
        for assigned in [*ways]:
            if config.type_in(site.name, site_type, assigned) == NONE:
                del ways[assigned]
        if site_type == NONE or len(ways) < 2:
            continue
        for operand in (site.lhs, site.rhs):
            counts: Counter[str] = Counter()
            for assigned, count in sorted(ways.items(), key=lambda item: _order(item[0])):
                counts[_entry(config, site, operand, site_type, assigned).choices] += count
            for words, count in counts.items():
                choices.append(Choices(site.name, operand, words, count, ways.total()))
    return choices


def _order(assigned: Assigned | None) -> tuple[str, str]:
    """Return a key that puts the layers without a rule first."""
    return (assigned.quant_type or "", assigned.recipe or "") if assigned else ("", "")


def layer_specs(
    config: QuantConfig, layers: Layers
) -> dict[tuple[str, str], tuple[OperandSpec, ...]]:
    """Return {(site, layer): how it quantizes both operands in each phase of training}."""
    return {
        (site.name, layer): tuple(
            config.operand_spec(site.name, operand, layer, kind)
            for kind in phase_types(config, site.name)
            for operand in (site.lhs, site.rhs)
        )
        for site in SITES.values()
        for layer in layers.get(site.name, ())
    }


def phase_types(config: QuantConfig, site: str, steps: int | None = None) -> list[str]:
    """Return the types of a site in the phases of a schedule that begin within `steps`."""
    types, begin = [], 0
    for phase in config.phases(site):
        if steps is None or begin < steps:
            types.append(phase.quant_type)
        if steps is not None:
            begin = phase.ends(steps) or steps
    return types


def unread(
    config: QuantConfig, name: str, layers: Layers | None = None, steps: int | None = None
) -> bool:
    """Return whether no entry changes if option `name` gets another valid value.

    Patterns affect the types of layers, not the entries: see `unread_patterns`.
    """
    table = entries(config, layers, steps)
    others = (replace(config, **{name: value}) for value in _other_values(config, name))
    return all(entries(other, layers, steps) == table for other in others)


def unread_schedules(config: QuantConfig, steps: int | None = None) -> list[str]:
    """Return the sites whose schedule has one type in all phases that begin within `steps`."""
    return [site for site in config.schedule if len({*phase_types(config, site, steps)}) == 1]


def unread_patterns(config: QuantConfig, name: str, layers: Layers | None = None) -> list[str]:
    """Return the patterns of `exclude` or `include`, by its name, that change no layer's type.

    Without `layers`, they are those that are only for sites without a type.
    """
    patterns = getattr(config, name)
    if layers is None:
        typed = [SITES[site] for site in _typed(config)]
        return [p for p in patterns if not any(excludes.is_for(p, s) for s in typed)]
    kept = {p: tuple(other for other in patterns if other != p) for p in patterns}
    return [p for p, others in kept.items() if not changes_layers(config, layers, **{name: others})]


def emptied_sites(config: QuantConfig, layers: Layers) -> list[str]:
    """Return the sites with a type all of whose layers `exclude` and `include` leave out."""
    return [
        site
        for site in _typed(config)
        if (names := layers.get(site, ()))
        and all(excludes.leave_out(config.exclude, config.include, site, name) for name in names)
    ]


def _typed(config: QuantConfig) -> list[str]:
    """Return the sites that have a type other than none in a phase of training."""
    return [site for site in SITES if set(phase_types(config, site)) != {NONE}]


def changes_layers(config: QuantConfig, layers: Layers, **changes: Any) -> bool:
    """Return whether some layer is quantized in another way with `changes` of the options."""
    return layer_specs(config, layers) != layer_specs(replace(config, **changes), layers)


def unread_rows(config: QuantConfig, layers: Layers | None = None) -> list[tuple[str, str]]:
    """Return (operand, key) for each key in [operands] that does not change an entry."""
    table = entries(config, layers)
    keys = []
    for name, row in config.operands.items():
        for key in row.chosen:
            plain = replace(row, **{key: getattr(PLAIN, key)})
            rows = {**config.operands, name: plain}
            with suppress(ValueError):  # a 'mixed' site needs the type
                if entries(replace(config, operands=rows), layers) == table:
                    keys.append((name, key))
    return keys


def readers(name: str, value: Any = None) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Return the formats and the sites that use an option, and whether only random draws do.

    `value` is that of the option: only some formats have a scale rule.
    """
    return _readers(name, value if name == "scale_rule" else None, registrations())


@functools.cache
def _readers(
    name: str, scale_rule: str | None, _: int
) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Return `readers`, which tries the option with each format at each site: it is slow."""
    chosen: dict[str, Any] = {"scale_rule": scale_rule} if scale_rule else {}
    by_rounding: dict[bool, set[tuple[str, str]]] = {}
    for stochastic in (False, True):
        rounding = "stochastic" if stochastic else None
        by_rounding[stochastic] = {
            (kind, site)
            for kind in FORMATS
            for site in SITES
            if not unread(QuantConfig(asked={site: kind}, rounding=rounding, **chosen), name)
        }
    pairs = by_rounding[False] or by_rounding[True]
    kinds, sites = ({pair[i] for pair in pairs} for i in (0, 1))
    listed = tuple(k for k in FORMATS if k in kinds), tuple(s for s in SITES if s in sites)
    return *listed, not by_rounding[False]


def _types(
    config: QuantConfig, site: GemmSite, layers: Layers | None, steps: int | None
) -> Iterator[tuple[str, Assigned | None]]:
    """Yield (the site's type, what a rule gives) for each kind of layer in each phase."""
    for site_type in phase_types(config, site.name, steps):
        if site_type == NONE:
            continue
        if layers is None:
            rules = (rule for rule in config.rules if excludes.is_for(rule.layers, site))
            ways = {None, *(rule.assigned for rule in rules)}
        else:
            names = layers.get(site.name, ())
            ways = {config.assigned(site.name, name, site_type) for name in names}
        for assigned in ways:
            if config.type_in(site.name, site_type, assigned) != NONE:
                yield site_type, assigned


def _entry(
    config: QuantConfig, site: GemmSite, operand: str, site_type: str, assigned: Assigned | None
) -> Entry:
    operand_spec = config.spec_in(site.name, operand, site_type, assigned)
    is_quantized = operand_spec.is_quantized
    draws_signs = operand_spec.hadamard is not None and operand_spec.hadamard.signs == "random"
    is_random = draws_signs or (is_quantized and operand_spec.spec.rounding == "stochastic")
    return Entry(
        site.name,
        operand,
        site_type,
        assigned,
        operand_spec,
        seed=config.seed if is_random else None,
        draws_once=config.cache_weights and (operand == "weight" or draws_signs),
        packed=config.save_activations == "packed" and (site.name, operand) == ("fprop", "x"),
        unnormalized=config.unnormalized_probs and is_quantized and operand == "probs",
        recorded=_recorded(config, site) if is_quantized or operand_spec.source else (0, (), False),
    )


def _recorded(config: QuantConfig, site: GemmSite) -> tuple[int, tuple[int, ...], bool]:
    has_noise = config.gradient_noise and config.every > 0 and site.name == WGRAD
    return config.every, config.dump, has_noise


def _other_values(config: QuantConfig, name: str) -> list[Any]:
    option, value = OPTIONS[name], getattr(config, name)
    if name == "scale_rule":  # formats without the rule do not read it
        rules = next(rules for rules in SCALE_RULES_OF.values() if value in rules)
        return [other for other in rules if other != value]
    if option.valid:
        return [other for other in (*option.valid, option.default) if other != value]
    if option.many:
        return [(), (*value, 1)]
    return [value + 1]
