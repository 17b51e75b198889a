"""Resolve a run's options into a table: how each operand of each site is quantized.

An option that changes no entry of the table has no effect, and the launcher refuses it. This module
needs only the standard library: `mqo`, which does not import torch, loads it by path.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mqo.quant import excludes
from mqo.quant.config import QuantConfig
from mqo.quant.formats import FORMATS, NONE, SITES, GemmSite
from mqo.quant.operand_table import PLAIN
from mqo.quant.options import OPTIONS
from mqo.quant.spec import OperandSpec

Layers = Mapping[str, Collection[str]]
"""The names of a model's layers, by site."""

READ_TABLES = ("quantizer", "record")
"""The tables of quant.toml whose options act through an entry."""


@dataclass(frozen=True)
class Entry:
    """How one operand is quantized, in the layers and the phase of training that have these types.

    Attributes:
        site: a name in SITES.
        operand: the name of one of its operands.
        site_type: the site's type in this phase of training.
        ruled: the type that a rule gives the layers; None if they have the site's.
        how: the format and its choices.
        seed: the base of the seeds, None if nothing random is drawn.
        draws_once: whether all micro-batches of a step share one draw, or one quantized weight.
        packed: whether the layer keeps the operand as codes for its backward pass.
        unnormalized: whether probabilities are quantized before they are normalized.
        recorded: the interval of the records, and the dumped iterations.
    """

    site: str
    operand: str
    site_type: str
    ruled: str | None
    how: OperandSpec
    seed: int | None
    draws_once: bool
    packed: bool
    unnormalized: bool
    recorded: tuple[int, tuple[int, ...]]

    @property
    def choices(self) -> str:
        """Return format, tile, rounding and the rest that differs from a format's defaults."""
        spec = self.how.spec
        words = [spec.quant_type]
        if spec.quant_type != NONE:
            words += [spec.tile_text, str(spec.rounding)]
            words += [spec.scale_rule] if spec.format.is_mx else []
        if turned := self.how.hadamard:
            words.append(f"hadamard {turned.points} {turned.signs}")
        words += [] if self.how.gain == 1.0 else [f"gain {self.how.gain:g}"]
        return " ".join(words)


def entries(
    config: QuantConfig, layers: Layers | None = None, steps: int | None = None
) -> frozenset[Entry]:
    """Return the entries of a run that quantize or transform an operand.

    Args:
        config: the options, and the types of the source.
        layers: the model's layers; None if they are not known: then each rule may match one.
        steps: the length of the training, so that phases that never begin are left out.

    Raises:
        ValueError: no row says how an operand of a 'mixed' site is quantized.
    """
    found = set()
    for site in SITES.values():
        for site_type, ruled in _types(config, site, layers, steps):
            for operand in (site.lhs, site.rhs):
                entry = _entry(config, site, operand, site_type, ruled)
                if entry.how.spec.quant_type != NONE or entry.how.hadamard:
                    found.add(entry)
    return frozenset(found)


@dataclass(frozen=True)
class Choices:
    """How `count` of the `total` layers of a site quantize one operand, in words."""

    site: str
    operand: str
    words: str
    count: int
    total: int


def differing(config: QuantConfig, layers: Layers) -> list[Choices]:
    """Return how operands are quantized at the sites whose quantized layers differ by rule."""
    found = []
    for site in SITES.values():
        site_type, names = config.phases(site.name)[0].quant_type, layers.get(site.name, ())
        ruled = Counter(config.ruled_type(site.name, name, site_type) for name in names)
        del ruled[NONE]
        if site_type == NONE or len(ruled) < 2:
            continue
        for operand in (site.lhs, site.rhs):
            for kind, count in sorted(ruled.items(), key=lambda one: (one[0] or "", one[1])):
                words = _entry(config, site, operand, site_type, kind).choices
                found.append(Choices(site.name, operand, words, count, ruled.total()))
    return found


def layer_types(config: QuantConfig, layers: Layers) -> dict[tuple[str, str], tuple[str, ...]]:
    """Return {(site, layer): its type in each phase of training}."""
    return {
        (site, layer): tuple(
            config.layer_type(site, layer, kind) for kind in phase_types(config, site)
        )
        for site in SITES
        for layer in layers.get(site, ())
    }


def phase_types(config: QuantConfig, site: str, steps: int | None = None) -> list[str]:
    """Return the types of a site in the phases of a schedule that begin within `steps`."""
    found, begin = [], 0
    for phase in config.phases(site):
        if steps is None or begin < steps:
            found.append(phase.quant_type)
        if steps is not None:
            begin = phase.ends(steps) or steps
    return found


def unread(
    config: QuantConfig, name: str, layers: Layers | None = None, steps: int | None = None
) -> bool:
    """Return whether no entry changes if option `name` gets another legal value.

    `exclude` is read by the types of layers and not by entries: see `unread_excludes`.
    """
    table = entries(config, layers, steps)
    others = (replace(config, **{name: value}) for value in _other_values(config, name))
    return all(entries(other, layers, steps) == table for other in others)


def unread_schedules(config: QuantConfig, steps: int | None = None) -> list[str]:
    """Return the sites whose schedule has one type in all phases that begin within `steps`."""
    return [site for site in config.schedule if len({*phase_types(config, site, steps)}) == 1]


def unread_excludes(config: QuantConfig, layers: Layers | None) -> list[str]:
    """Return the patterns of `exclude` that change the type of no layer."""
    if layers is None:
        typed = [SITES[site] for site in SITES if set(phase_types(config, site)) != {NONE}]
        return [one for one in config.exclude if not any(excludes.is_for(one, s) for s in typed)]
    kept = {one: tuple(o for o in config.exclude if o != one) for one in config.exclude}
    return [
        one for one, others in kept.items() if not changes_layers(config, layers, exclude=others)
    ]


def changes_layers(config: QuantConfig, layers: Layers, **changes: Any) -> bool:
    """Return whether some layer has another type with `changes` of the options."""
    return layer_types(config, layers) != layer_types(replace(config, **changes), layers)


def unread_rows(config: QuantConfig, layers: Layers | None = None) -> list[tuple[str, str]]:
    """Return (operand, key) of each key in [operands] that changes no entry."""
    table = entries(config, layers)
    found = []
    for name, row in config.operands.items():
        for key in row.chosen:
            plain = replace(row, **{key: getattr(PLAIN, key)})
            rows = {**config.operands, name: plain}
            with suppress(ValueError):  # a 'mixed' site needs the type
                if entries(replace(config, operands=rows), layers) == table:
                    found.append((name, key))
    return found


def readers(name: str) -> tuple[list[str], list[str], bool]:
    """Return the formats and the sites that read an option, and whether only random draws do."""
    found: dict[bool, set[tuple[str, str]]] = {}
    for stochastic in (False, True):
        rounding = "stochastic" if stochastic else None
        found[stochastic] = {
            (kind, site)
            for kind in FORMATS
            for site in SITES
            if not unread(QuantConfig(asked={site: kind}, rounding=rounding), name)
        }
    pairs = found[False] or found[True]
    kinds, sites = ({pair[i] for pair in pairs} for i in (0, 1))
    listed = [k for k in FORMATS if k in kinds], [s for s in SITES if s in sites]
    return *listed, not found[False]


def _types(
    config: QuantConfig, site: GemmSite, layers: Layers | None, steps: int | None
) -> Iterator[tuple[str, str | None]]:
    """Yield (the site's type, the type by rule) of each kind of layer in each phase."""
    for site_type in phase_types(config, site.name, steps):
        if site_type == NONE:
            continue
        if layers is None:
            rules = (rule for rule in config.rules if excludes.is_for(rule.layers, site))
            ruled = {None, *(rule.quant_type for rule in rules)}
        else:
            names = layers.get(site.name, ())
            ruled = {config.ruled_type(site.name, name, site_type) for name in names}
        yield from ((site_type, kind) for kind in ruled if kind != NONE)


def _entry(
    config: QuantConfig, site: GemmSite, operand: str, site_type: str, ruled: str | None
) -> Entry:
    how = config.spec_in(site.name, operand, site_type, ruled)
    is_quantized = how.spec.quant_type != NONE
    draws_signs = how.hadamard is not None and how.hadamard.signs == "random"
    is_random = draws_signs or (is_quantized and how.spec.rounding == "stochastic")
    return Entry(
        site.name,
        operand,
        site_type,
        ruled,
        how,
        seed=config.seed if is_random else None,
        draws_once=config.cache_weights and (operand == "weight" or draws_signs),
        packed=config.save_activations == "packed" and (site.name, operand) == ("fprop", "x"),
        unnormalized=config.unnormalized_probs and is_quantized and operand == "probs",
        recorded=(config.every, config.dump) if is_quantized else (0, ()),
    )


def _other_values(config: QuantConfig, name: str) -> list[Any]:
    option, value = OPTIONS[name], getattr(config, name)
    if option.valid:
        return [other for other in (*option.valid, option.default) if other != value]
    if option.many:
        return [(), (*value, 1)]
    return [value + 1]
