"""The least time that a step takes on a device, from what it computes, moves and exchanges.

An estimate: every operation takes the longer of two times at the device's peak rates, that of its
FLOPs and that of its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from mqo.scale.devices import Device
from mqo.simulate.facts import Exchange, RankFacts, Work

GIGA, TERA = 1e9, 1e12
# upstream's descriptions of its groups, as they begin -> the parallelism. The first that fits.
_GROUPS = {
    "TENSOR_MODEL": "TP",
    "CONTEXT": "CP",
    "PIPELINE": "PP",
    "EMBEDDING": "PP",
    "POSITION_EMBEDDING": "PP",
    "EXPERT_MODEL": "EP",
    "EXPERT_TENSOR_AND_MODEL": "EP",
    "EXPERT_TENSOR": "EP",
    "EXPERT_DATA": "expert DP",
    "INTRA_PARTIAL_EXPERT_DATA": "expert DP",
    "DATA_PARALLEL": "DP",
    "INTRA_PARTIAL_DATA": "DP",
    "TENSOR_AND_CONTEXT": "TP",
}
OTHER = "all ranks"


@dataclass(frozen=True)
class Part:
    """Some of a step's work: how often, FLOPs, bytes, and seconds at peak rates."""

    calls: float = 0
    flops: float = 0
    size: float = 0
    seconds: float = 0

    def __add__(self, other: Part) -> Part:
        """Return both."""
        return Part(
            self.calls + other.calls,
            self.flops + other.flops,
            self.size + other.size,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class Roofline:
    """A rank's step: products, all other kernels, exchanges by (parallelism, operation).

    `bubble` is the part of the computing that the pipeline's stages wait for one another, in
    addition.
    """

    products: Part
    others: Part
    exchanges: dict[tuple[str, str], Part]
    bubble: float

    @classmethod
    def of(cls, rank: RankFacts, device: Device) -> Roofline:
        """Return a rank's."""
        products, others = Part(), Part()
        for work, calls in rank.works().items():
            part = Part(calls, work.flops * calls, work.size * calls, calls * seconds(work, device))
            products, others = (
                (products + part, others) if work.flops else (products, others + part)
            )
        found: dict[tuple[str, str], Part] = {}
        for exchange, calls in rank.exchanges().items():
            key = (parallelism(exchange.group), exchange.operation)
            part = Part(calls, 0, exchange.wire * calls, calls * wire_seconds(exchange, device))
            found[key] = found.get(key, Part()) + part
        bubble = (rank.stages - 1) / (rank.chunks * max(1, rank.micro_batches))
        return cls(products, others, found, bubble)

    @property
    def computing(self) -> float:
        """Return the seconds of all kernels, one after another."""
        return self.products.seconds + self.others.seconds

    @property
    def exchanging(self) -> float:
        """Return the seconds of all exchanges, one after another."""
        return sum(part.seconds for part in self.exchanges.values())

    @property
    def overlapped(self) -> float:
        """Return the seconds of a step that overlaps both completely."""
        return max(self.computing * (1 + self.bubble), self.exchanging)

    @property
    def serial(self) -> float:
        """Return the seconds of a step that hides nothing."""
        return self.computing * (1 + self.bubble) + self.exchanging

    @property
    def bound(self) -> str:
        """Return what takes the most of it."""
        waiting = self.computing * self.bubble
        parts = {
            "matrix products": self.products.seconds,
            "memory bandwidth, of the kernels beside matrix products": self.others.seconds,
            "communication": self.exchanging,
            "the pipeline's bubble": waiting,
        }
        return max(parts, key=lambda name: parts[name])


def parallelism(group: str) -> str:
    """Return which parallelism a group of upstream's serves."""
    return next((name for start, name in _GROUPS.items() if group.startswith(start)), OTHER)


def seconds(work: Work, device: Device) -> float:
    """Return the longer of an operation's two times."""
    flops = work.flops * (1 - work.masked) / (device.bf16_tflops * TERA)
    return max(flops, work.size / (device.memory_gbs * GIGA))


def wire_seconds(exchange: Exchange, device: Device) -> float:
    """Return the seconds that a rank sends, by a ring.

    Between nodes, all adapters of the group's GPUs in a node work at once.
    """
    rate = device.link_gbs
    if exchange.nodes > 1:
        a_node = max(1, exchange.ranks // exchange.nodes)
        rate = min(rate, device.network_gbs * a_node)
    return exchange.wire / (rate * GIGA)
