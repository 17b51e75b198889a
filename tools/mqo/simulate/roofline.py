"""Estimate the least time of a step on a device from its FLOPs, bytes and exchanges.

Each operation takes the longer of two times at the device's peak rates: its FLOPs and its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from mqo.megatron.simulation.rows import Exchange, Work
from mqo.scale.devices import Device
from mqo.simulate.facts import RankFacts

GIGA, TERA = 1e9, 1e12
# {prefix of upstream's description of a group: parallelism}; the first match counts.
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
class Cost:
    """The cost of part of a step: calls, FLOPs, bytes, and seconds at peak rates."""

    calls: float = 0
    flops: float = 0
    size: float = 0
    seconds: float = 0

    def __add__(self, other: Cost) -> Cost:
        """Return the sum."""
        return Cost(
            self.calls + other.calls,
            self.flops + other.flops,
            self.size + other.size,
            self.seconds + other.seconds,
        )


@dataclass(frozen=True)
class Roofline:
    """The cost of a rank's step: products, other kernels, exchanges by (parallelism, operation).

    `bubble` is the time that pipeline stages wait for each other, relative to the computing time.
    """

    products: Cost
    others: Cost
    exchanges: dict[tuple[str, str], Cost]
    bubble: float

    @classmethod
    def for_rank(cls, rank: RankFacts, device: Device) -> Roofline:
        """Return the roofline of a rank on a device."""
        products, others = Cost(), Cost()
        for work, calls in rank.works().items():
            cost = Cost(calls, work.flops * calls, work.size * calls, calls * seconds(work, device))
            products, others = (
                (products + cost, others) if work.flops else (products, others + cost)
            )
        exchanges: dict[tuple[str, str], Cost] = {}
        for exchange, calls in rank.exchanges().items():
            key = (parallelism(exchange.group), exchange.operation)
            cost = Cost(calls, 0, exchange.wire * calls, calls * wire_seconds(exchange, device))
            exchanges[key] = exchanges.get(key, Cost()) + cost
        bubble = (rank.stages - 1) / (rank.chunks * max(1, rank.micro_batches))
        return cls(products, others, exchanges, bubble)

    @property
    def computing(self) -> float:
        """Return the seconds of all kernels, one after another."""
        return self.products.seconds + self.others.seconds

    @property
    def exchanging(self) -> float:
        """Return the seconds of all exchanges, one after another."""
        return sum(cost.seconds for cost in self.exchanges.values())

    @property
    def overlapped(self) -> float:
        """Return the seconds of a step with complete overlap of computing and exchanges."""
        return max(self.computing * (1 + self.bubble), self.exchanging)

    @property
    def serial(self) -> float:
        """Return the seconds of a step without overlap."""
        return self.computing * (1 + self.bubble) + self.exchanging

    @property
    def bound(self) -> str:
        """Return the name of what takes the most time."""
        waiting = self.computing * self.bubble
        parts = {
            "matrix products": self.products.seconds,
            "memory bandwidth, in kernels other than matrix products": self.others.seconds,
            "communication": self.exchanging,
            "the pipeline's bubble": waiting,
        }
        return max(parts, key=lambda name: parts[name])


def parallelism(group: str) -> str:
    """Return the parallelism that an upstream group serves."""
    return next((name for start, name in _GROUPS.items() if group.startswith(start)), OTHER)


def seconds(work: Work, device: Device) -> float:
    """Return the seconds of an operation: the longer of its two times."""
    flops = work.flops * (1 - work.masked) / (device.bf16_tflops * TERA)
    return max(flops, work.size / (device.memory_gbs * GIGA))


def wire_seconds(exchange: Exchange, device: Device) -> float:
    """Return the seconds that a rank sends in a ring.

    Between nodes, the network adapters of all GPUs of a node work at once.
    """
    rate = device.link_gbs
    if exchange.nodes > 1:
        a_node = max(1, exchange.ranks // exchange.nodes)
        rate = min(rate, device.network_gbs * a_node)
    return exchange.wire / (rate * GIGA)
