"""How a job's GPUs share the work, and the flags that say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mqo.matrix.tables import Model

GPUS_PER_NODE = 8
Recompute = Literal["none", "core_attn", "full"]
# Upstream's flags: what a layer's backward pass computes again instead of having kept it.
_RECOMPUTE: dict[Recompute, str] = {
    "none": "",
    "core_attn": "--recompute-granularity selective --recompute-modules core_attn",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


@dataclass(frozen=True)
class Layout:
    """Parallel sizes over `gpus` processes, without context parallelism; experts have TP's."""

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    recompute: Recompute = "none"

    @property
    def nodes(self) -> int:
        """Machines of GPUS_PER_NODE."""
        return -(-self.gpus // GPUS_PER_NODE)

    @property
    def data(self) -> int:
        """Data-parallel ranks of what is no expert."""
        return self.gpus // (self.tensor * self.pipeline)

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.data // self.expert

    def layers(self, model: Model, stage: int) -> range:
        """The layers of a pipeline stage."""
        count = model.num_layers // self.pipeline
        return range(stage * count, (stage + 1) * count)

    def flags(self) -> tuple[str, ...]:
        """Upstream's, to stand behind `--`."""
        words = ["--use-distributed-optimizer", _RECOMPUTE[self.recompute]]
        for kind in ("tensor", "pipeline", "expert"):
            size = getattr(self, kind)
            words += [f"--{kind}-model-parallel-size {size}"] if size > 1 else []
        words += ["--sequence-parallel"] if self.tensor > 1 else []
        words += ["--moe-token-dispatcher-type alltoall"] if self.expert > 1 else []
        return tuple(" ".join(words).split())
