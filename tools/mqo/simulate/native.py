"""Estimate a step on a device that computes in the run's formats, from simulated steps.

All figures are estimates at peak rates. The step without quantization is simulated, and each of its
GEMMs whose operands the run quantizes takes the longer of two times: its FLOPs at the rate of the
wider format, and its operands' codes and its bf16 result at the memory rate. ASSUMPTIONS lists the
rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mqo.errors import MqoError
from mqo.launch.config import RunConfig
from mqo.megatron.simulation.rows import Work
from mqo.quant.formats import ATTENTION, FAMILIES, FORMATS, LINEAR, NONE, SITES
from mqo.quant.operand_table import member
from mqo.scale.choose import Workload
from mqo.scale.devices import DEVICES, Device, device
from mqo.scale.layout import Layout
from mqo.scale.memory import BF16, CONTEXT, Arithmetic, stage_memory
from mqo.simulate.facts import RankFacts
from mqo.simulate.result import Simulation, needed
from mqo.simulate.roofline import GIGA, TERA, Cost, Roofline, seconds

ASSUMPTIONS = (
    "GEMMs and memory reach the peak rates; the kernels are those of local layers, as simulated",
    "a kernel of its own reads each bf16 operand once per micro-batch (twice if a scale needs the "
    "tensor's amax) and writes the codes for each GEMM; a Hadamard transform is part of it",
    "fused attention multiplies QK and PV at the rates of their formats; few libraries have such "
    "kernels, and no known one quantizes only QK; its backward pass is in bf16",
    "weights stay in bf16, and exchanges send bf16",
    "a linear layer saves its input as codes if wgrad quantizes it; attention saves bf16",
)
FUSED_ATTENTION = "fused attention"
# {(layer, site): {type of the operands: share of the calls}}
GemmTypes = Mapping[tuple[str, str], Mapping[str, float]]


@dataclass(frozen=True)
class NativeStep:
    """A rank's step in native formats; `quantizing` is included in the other kernels."""

    roofline: Roofline
    quantizing: Cost


@dataclass(frozen=True)
class NativeEstimate:
    """A run on a device that computes in its formats, compared with the run without quantization.

    `base` is simulated without quantization, `ranks` with the types of linear layers. `types` are
    the run's quant types by site, `work` and `layout` its sizes.
    """

    config: RunConfig
    base: Simulation
    ranks: tuple[RankFacts, ...]
    types: Mapping[str, str]
    work: Workload
    layout: Layout

    @property
    def formats(self) -> set[str]:
        """Return the formats that the run's GEMMs compute in."""
        pairs = (name for rank in self.ranks for row in gemm_types(rank).values() for name in row)
        linear = {name for pair in pairs if is_quantized(pair) for name in pair.split(" x ")}
        attention = {self.types[name] for name in _sites(ATTENTION)}
        unnamed = {name for name in attention & FAMILIES.keys() if not FAMILIES[name].others}
        return linear | unnamed | set(formats_of(attention))

    @cached_property
    def step(self) -> NativeStep:
        """Return the step of the rank whose kernels take longest."""
        on = device(self.base.device)
        pairs = zip(self.base.ranks, self.ranks, strict=True)
        steps = [native_step(base, gemm_types(rank), self.types, on) for base, rank in pairs]
        return max(steps, key=lambda step: step.roofline.computing)

    @property
    def base_step(self) -> Roofline:
        """Return the roofline of the run without quantization."""
        return self.base.roofline(self.base.slowest)

    def speedups(self) -> tuple[float, float]:
        """Return the factors between the steps: if nothing overlaps, and if all that can does."""
        native, base = self.step.roofline, self.base_step
        return base.serial / native.serial, base.overlapped / native.overlapped

    def need(self) -> int:
        """Return the bytes that the fullest rank needs, including the reserve."""
        pairs = zip(self.base.ranks, self.ranks, strict=True)
        return max(needed(base) - self._saved(base, rank) for base, rank in pairs) + CONTEXT

    @property
    def fits(self) -> bool:
        """Return whether the fullest rank fits."""
        return self.need() <= self.base.room

    def _saved(self, base: RankFacts, rank: RankFacts) -> int:
        """Return the bytes that a rank saves by keeping inputs of linear layers as codes."""
        counts: dict[str, float] = {}
        for work, calls in rank.works().items():
            if work.gemm == "wgrad":
                name = work.quant_type or NONE
                counts[name] = counts.get(name, 0.0) + calls * work.operands[1]
        saved = 0.0
        for name in filter(is_quantized, counts):
            arithmetic = Arithmetic(name.split(" x ")[-1])
            sizes = (self.work.model, self.work.training, arithmetic, self.layout, base.stage)
            memory = stage_memory(*sizes, self.work.dtype, uneven=self.base.imbalance)
            saved += memory.packed * counts[name] / sum(counts.values())
        return round(saved)

    def as_table(self) -> dict[str, Any]:
        """Return the table for JSON."""
        step, base, speedups = self.step, self.base_step, self.speedups()
        rates = [rate.model_dump() for rate in device(self.base.device).native]
        rooflines = {"unquantized": base, "native": step.roofline}
        return {
            "estimated": True,
            "model": self.config.experiment.model_name,
            "mode": self.config.quantization.name,
            "device": self.base.device,
            "layout": self.base.layout,
            "formats": sorted(self.formats),
            "rates": rates,
            "assumptions": list(ASSUMPTIONS),
            "seconds": {name: seconds_of(roofline) for name, roofline in rooflines.items()},
            "quantizing": vars(step.quantizing),
            "speed_up": {"serial": speedups[0], "overlapped": speedups[1]},
            "memory": {"unquantized": self.base.need, "native": self.need()},
            "fits": self.fits,
        }


def seconds_of(roofline: Roofline) -> dict[str, float]:
    """Return the seconds of the parts of a step and of the whole."""
    return {
        "products": roofline.products.seconds,
        "others": roofline.others.seconds,
        "exchanges": roofline.exchanging,
        "serial": roofline.serial,
        "overlapped": roofline.overlapped,
    }


# -- types -----------------------------------------------------------------------------------------


def gemm_types(rank: RankFacts) -> dict[tuple[str, str], dict[str, float]]:
    """Return the types of a simulated rank's linear GEMMs, each with its share of the calls."""
    counts: dict[tuple[str, str], dict[str, float]] = {}
    for work, calls in rank.works().items():
        if work.gemm in _sites(LINEAR):
            row = counts.setdefault((work.layer, work.gemm), {})
            name = work.quant_type or NONE
            row[name] = row.get(name, 0.0) + calls
    return {
        key: {name: calls / sum(row.values()) for name, calls in row.items()}
        for key, row in counts.items()
    }


def pair_of(site: str, quant_type: str) -> str:
    """Return the formats of a site's two operands, as a simulation names them."""
    names = (member(quant_type, operand) for operand in (SITES[site].lhs, SITES[site].rhs))
    return " x ".join(dict.fromkeys(name or quant_type for name in names))


def is_quantized(pair: str) -> bool:
    """Return whether both operands of a GEMM are quantized."""
    return NONE not in pair.split(" x ")


def formats_of(types: Iterable[str]) -> list[str]:
    """Return the formats that quant types name; those of 'mixed' are known after a simulation."""
    names: list[str | None] = []
    for name in types:
        family = FAMILIES.get(name)
        names += [family.others, family.gradients] if family else [name]
    return sorted({name for name in names if name and name != NONE})


def check_formats(formats: Iterable[str], name: str) -> None:
    """Raise MqoError for a format in which the device has no GEMMs."""
    on = device(name)
    for wanted in sorted(formats):
        if on.native_rate(wanted):
            continue
        others = [other for other, row in DEVICES.items() if row.native_rate(wanted)]
        own = sorted(row for rate in on.native for row in rate.formats)
        raise MqoError(
            f"{name} has no GEMMs in {wanted}",
            expected=f"formats of {name}: {', '.join(own) or 'none'}",
            help=f"Use --device {others[0]}, which has {wanted}"
            if others
            else f"Run `mqo simulate` without --native, since no device has {wanted}",
        )


# -- time ------------------------------------------------------------------------------------------


def native_step(
    rank: RankFacts, linear: GemmTypes, types: Mapping[str, str], on: Device
) -> NativeStep:
    """Return the step of a rank, simulated without quantization, with types in its GEMMs.

    `types` are by site; those of attention count.
    """
    base = Roofline.for_rank(rank, on)
    products = quantizing = Cost()
    for work, calls in rank.works().items():
        if not work.flops:
            continue
        if work.gemm == FUSED_ATTENTION:
            busy, moved = _attention(work, types, on)
        elif work.gemm in _sites(ATTENTION):
            pair = pair_of(work.gemm, types[work.gemm])
            busy, moved = _product(work, pair, types, on)
        else:
            busy = moved = 0.0
            is_site = work.gemm in _sites(LINEAR)
            row = linear[work.layer, work.gemm] if is_site else {NONE: 1.0}
            sites = {site: _main_type(linear, work.layer, site) for site in _sites(LINEAR)}
            for name, share in row.items():
                spent, read = _product(work, name, sites, on)
                busy, moved = busy + share * spent, moved + share * read
        products += Cost(calls, work.flops * calls, work.size * calls, busy * calls)
        traffic = moved * calls
        quantizing += Cost(calls * (moved > 0), 0, traffic, traffic / (on.memory_gbs * GIGA))
    roofline = Roofline(products, base.others + quantizing, base.exchanges, base.bubble)
    return NativeStep(roofline, quantizing)


def _sites(kind: str) -> tuple[str, ...]:
    """Return the sites of a kind that an estimate counts: none of attention's backward pass."""
    return tuple(s.name for s in SITES.values() if s.layer == kind and not s.backward_of)


def _main_type(linear: GemmTypes, layer: str, site: str) -> str:
    """Return the type that quantizes a site of a layer, or 'none'."""
    names = linear.get((layer, site), {})
    return next((name for name in names if is_quantized(name)), NONE)


def _product(work: Work, pair: str, types: Mapping[str, str], on: Device) -> tuple[float, float]:
    """Return the seconds of a GEMM, and the bytes that quantizing its operands moves.

    `types` are those of the sites of its layer: a tensor that two GEMMs quantize is read once.
    """
    if not is_quantized(pair):
        return seconds(work, on), 0.0
    names = (pair.split(" x ") * 2)[:2]
    site, moved, size = SITES[work.gemm], 0.0, float(work.size)
    for tensor, name, count in zip((site.lhs, site.rhs), names, work.operands, strict=True):
        saved, traffic = _coded(name, count, _reads(tensor, work.gemm, types, name))
        size, moved = size - saved, moved + traffic
    rate = min(on.tflops(name) for name in names)
    return max(work.flops * (1 - work.masked) / (rate * TERA), size / (on.memory_gbs * GIGA)), moved


def _reads(tensor: str, gemm: str, types: Mapping[str, str], name: str) -> int:
    """Return how often a kernel reads a tensor to quantize it for a GEMM; 0 if one before did."""
    users = [
        site.name
        for site in SITES.values()
        if tensor in (site.lhs, site.rhs) and is_quantized(types.get(site.name, NONE))
    ]
    if users and users[0] != gemm:
        return 0
    return _passes(name)


def _passes(name: str) -> int:
    """Return how often a kernel reads a tensor to quantize it."""
    return 2 if FORMATS[name].needs_tensor_amax else 1


def _coded(name: str, count: int, reads: int) -> tuple[float, float]:
    """Return the bytes that codes of bf16 elements save, and those that quantizing moves."""
    codes = FORMATS[name].packed_bytes * count
    return BF16 * count - codes, codes + reads * BF16 * count


def _attention(work: Work, types: Mapping[str, str], on: Device) -> tuple[float, float]:
    """Return the seconds of fused attention's forward pass, and the bytes of quantizing for it.

    Half of the FLOPs are of QK, half of PV, whose probabilities stay on the chip. Values count as
    many elements as keys.
    """
    query, key = work.operands
    compute, moved, size = 0.0, 0.0, float(work.size)
    for site, counts in (("qk", (query, key)), ("pv", (key,))):
        name = next(iter(formats_of([types[site]])), NONE)
        flops = work.flops * (1 - work.masked) / 2
        compute += flops / (on.tflops(name) * TERA)
        if name != NONE:
            saved, traffic = _coded(name, sum(counts), _passes(name))
            size, moved = size - saved, moved + traffic
    return max(compute, size / (on.memory_gbs * GIGA)), moved
