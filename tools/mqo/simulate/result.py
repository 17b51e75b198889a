"""Evaluate a simulated run on a device: memory, step time, and a table for JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mqo.launch.config import RunConfig
from mqo.scale.devices import device, usable
from mqo.scale.memory import CONTEXT
from mqo.simulate.facts import RankFacts
from mqo.simulate.roofline import Roofline

# Memory that a simulation does not include. CONTEXT is the reserve for it.
UNSEEN = "for CUDA's context, NCCL's and cuBLAS's buffers"


@dataclass(frozen=True)
class Simulation:
    """The simulated ranks of a run on a device; `imbalance` is the experts' share of tokens."""

    config: RunConfig
    device: str
    layout: str
    imbalance: float
    ranks: tuple[RankFacts, ...]

    @property
    def worst(self) -> RankFacts:
        """Return the rank that needs the most memory."""
        return max(self.ranks, key=needed)

    @property
    def slowest(self) -> RankFacts:
        """Return the rank with the slowest kernels."""
        return max(self.ranks, key=lambda rank: self.roofline(rank).computing)

    @property
    def need(self) -> int:
        """Return the bytes that the worst rank needs, including the reserve."""
        return needed(self.worst) + CONTEXT

    @property
    def room(self) -> int:
        """Return the usable bytes of a device."""
        return usable(device(self.device).memory)

    @property
    def fits(self) -> bool:
        """Return whether the worst rank fits."""
        return self.need <= self.room

    def roofline(self, rank: RankFacts) -> Roofline:
        """Return the roofline of a rank."""
        return Roofline.for_rank(rank, device(self.device))

    def as_table(self) -> dict[str, Any]:
        """Return the table for JSON."""
        experiment, quantization = self.config.experiment, self.config.quantization
        bound = self.roofline(self.slowest)
        return {
            "model": experiment.model_name,
            "mode": quantization.name,
            "training": experiment.training.name,
            "dtype": experiment.dtype,
            "device": self.device,
            "gpus": self.config.placement.cluster.processes,
            "layout": self.layout,
            "flags": [*self.config.placement.layout, *experiment.extra_flags],
            "imbalance": self.imbalance,
            "fits": self.fits,
            "need": self.need,
            "room": self.room,
            "reserve": CONTEXT,
            "roofline": {
                "products": vars(bound.products),
                "others": vars(bound.others),
                "exchanges": [
                    {"parallelism": kind, "operation": name, **vars(part)}
                    for (kind, name), part in bound.exchanges.items()
                ],
                "bubble": bound.bubble,
                "seconds_overlapped": bound.overlapped,
                "seconds_serial": bound.serial,
                "bound": bound.bound,
            },
            "ranks": [_rank_table(rank) for rank in self.ranks],
        }


def _rank_table(rank: RankFacts) -> dict[str, Any]:
    """Return a rank's facts, with its steps combined into one step of the run."""
    works = [work._asdict() | {"calls": calls} for work, calls in rank.works().items()]
    exchanges = [
        exchange._asdict() | {"wire": exchange.wire, "calls": calls}
        for exchange, calls in rank.exchanges().items()
    ]
    facts = rank.model_dump(exclude={"steps"})
    return facts | {
        "micro_batches": rank.micro_batches,
        "is_steady": rank.is_steady,
        "works": works,
        "exchanges": exchanges,
    }


def needed(rank: RankFacts) -> int:
    """Return the peak bytes of a rank's tensors, including set-up."""
    return max(rank.setup_peak, *rank.step_peaks)
