"""Choose the ranks and the steps of a run to simulate, and simulate them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mqo.display import Say
from mqo.launch.config import RunConfig
from mqo.launch.flags import distillation_flags, model_flags, vocabulary_flags
from mqo.launch.layout import read_sizes
from mqo.launch.machine import Machine
from mqo.launch.program_cache import ask_cached, source_of
from mqo.matrix import layer_pattern
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.program import at_once
from mqo.project import Project
from mqo.simulate.facts import RankFacts

PROGRAM = "tools/simulate.py"
TIME_LIMIT_S = 1800
# The flags that split layers unevenly over stages.
_UNEVEN = ("--pipeline-model-parallel-layout", "--decoder-first-", "--decoder-last-", "--account-")
_TEACHER = "--export-kd-teacher-load"
_INTERLEAVED = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")


@dataclass(frozen=True)
class RunJob:
    """A run to simulate: its flags for Megatron, its quant.toml, and the imbalance of tokens."""

    config: RunConfig
    flags: tuple[str, ...]
    options: str
    imbalance: float

    @classmethod
    def from_config(
        cls, config: RunConfig, machine: Machine, types: dict[str, str], imbalance: float
    ) -> RunJob:
        """Return the job of a run on a machine; `types` are the quant types in its source."""
        experiment = config.experiment
        sizes = (*vocabulary_flags(experiment), "--no-create-attention-mask-in-dataloader")
        layout = config.placement.layout
        own = (*model_flags(experiment, machine, layout), *layout, *experiment.extra_flags)
        flags = (*sizes, *own, *distillation_flags(experiment))
        # No measurements, because these read values.
        recording = config.recording.options | {"every": 0, "dump": ()}
        options = config.changed("recording", options=recording).quant_toml(types)
        return cls(config, flags, options, imbalance)

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield the request for each rank."""
        sizes = read_sizes(self.flags)
        cluster, stages = self.config.placement.cluster, sizes.pipeline_model_parallel_size
        names = [word.partition("=")[0] for word in self.flags]
        interleaved = any(name in _INTERLEAVED for name in names)
        interleaved |= self.config.experiment.model.is_interleaved(stages)
        ranks = sizes.tensor_model_parallel_size * stages * sizes.context_parallel_size
        whole = sizes.global_batch_size * ranks // (sizes.micro_batch_size * cluster.processes)
        for stage in self._stages(stages):
            yield {
                "world": cluster.processes,
                "rank": stage * cluster.processes // stages,
                "per_node": cluster.nproc_per_node,
                "flags": list(self.flags),
                "micro_batches": steps(whole, stages, interleaved, _TEACHER in names),
                "imbalance": self.imbalance,
            }

    def _stages(self, stages: int) -> list[int]:
        """Return the distinct pipeline stages; of equal ones that with the most in flight."""
        if stages <= 3 or any(word.startswith(_UNEVEN) for word in self.flags):
            return list(range(stages))
        if (pattern := self.config.experiment.model.pattern) is None:
            return [0, 1, stages - 1]
        layers = layer_pattern.stages_of(pattern, stages)
        first = {layers[stage]: stage for stage in range(stages - 2, 0, -1)}
        return [0, *sorted(first.values()), stages - 1]


def steps(micro_batches: int, stages: int, interleaved: bool, distills: bool = False) -> list[int]:
    """Return the micro-batches of the steps that are simulated.

    The first step creates the optimizer's states. The next has all micro-batches that are in flight
    at once, and the last has the least number more: further ones repeat the difference. A
    distillation with one micro-batch has one pass, with more it may have two.
    """
    more = stages if interleaved else 1
    least = max(more, 2) if distills else more
    filled = max(least, 2 * stages if interleaved else stages)
    if micro_batches <= filled + more:
        return [least, micro_batches] if micro_batches > least else [micro_batches] * 2
    return [least, filled, filled + more]


def simulate(
    project: Project, tree: Tree, series: Series, job: RunJob, say: Say
) -> list[RankFacts]:
    """Simulate a rank of each distinct pipeline stage, one per core at once."""
    requests = list(job.requests())
    with source_of(project, tree, series, job.config, PROGRAM) as source:

        def run(request: dict[str, Any]) -> dict[str, Any]:
            return ask_cached(
                project,
                source,
                PROGRAM,
                "simulate",
                {"job": request},
                options=job.options,
                limit_s=TIME_LIMIT_S,
                help="Leave out options that need data, because they cannot be simulated",
            )

        say(f"simulate : {len(requests)} of {job.config.placement.cluster.processes} ranks")
        ranks = at_once(run, requests, threads=len(os.sched_getaffinity(0)))
        return [RankFacts(**facts) for facts in ranks]
