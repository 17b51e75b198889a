"""Set up upstream's program as one rank, and run a few steps of it."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from mqo.megatron.simulation import as_cuda, routing, teacher
from mqo.megatron.simulation.collectives import Collectives
from mqo.megatron.simulation.memory import AllocationLog
from mqo.megatron.simulation.unreal import without_data
from mqo.megatron.simulation.watch import Watch
from mqo.megatron.simulation.work import Tags, Works, tagging


@dataclass(frozen=True)
class RankJob:
    """The rank to simulate: `rank` of `world`, with `per_node` ranks per node.

    `micro_batches` are those of each step. There is more than one step, because the first creates
    the optimizer's states. This rank's experts get `imbalance` times their even share of tokens.
    `real` runs the same on real tensors and real processes, for comparison.
    """

    world: int
    rank: int
    per_node: int
    flags: list[str]
    micro_batches: list[int]
    imbalance: float = 1.0
    real: bool = False


@dataclass(frozen=True)
class Step:
    """The clocks at the start and the end of a step, and its work and exchanges."""

    start: int
    end: int
    micro_batches: int
    works: Works
    collectives: Collectives


def run(job: RankJob) -> "Trainer":
    """Build the rank's part of the model, and train it for the steps of the job."""
    memory, tags = AllocationLog(only_fake=not job.real), Tags()
    watch = Watch(memory)
    prepare(job, watch, tags)
    container, forward_step = read_arguments(job)
    with nullcontext() if job.real else without_data(), memory.watching_sizes(), watch:
        trainer = Trainer(container, watch, memory)
        with watch.following(trainer.models):
            trainer.train(forward_step, job, tags)
        trainer.name_owned()
    return trainer


def prepare(job: RankJob, watch: Watch, tags: Tags) -> None:
    """Install the replacements, before upstream is imported."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    os.environ |= {"WORLD_SIZE": str(job.world), "RANK": str(job.rank), "LOCAL_RANK": "0"}
    from mqo.quant import gemms

    gemms.gemm_operands = tagging(gemms.gemm_operands, tags)
    as_cuda.import_megatron(watch)
    as_cuda.chunk_sizes()
    routing.with_counts(job.imbalance)


def read_arguments(job: RankJob) -> tuple[Any, Any]:
    """Return upstream's configuration and the program's forward step."""
    fake = [] if job.real else ["--fake-process-group"]
    # Reruns compare values, and there are none.
    data = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--rerun-mode", "disabled"]
    sys.argv[1:] = [*job.flags, *data, *fake]
    from megatron.inference.gpt import releases
    from megatron.inference.gpt.batches import check_documents
    from megatron.inference.gpt.model_provider import model_provider
    from megatron.training.initialize import initialize_megatron

    import mqo.megatron.hooks

    forward_step, extra_args = teacher.program(job.flags)
    args = releases.parse(extra_args)
    args.load = args.save = args.pretrained_checkpoint = None
    check_documents(args)
    mqo.megatron.hooks.before_model(args)
    mqo.megatron.hooks.check_available(args)
    container = releases.container(args, model_provider)
    initialize_megatron()
    return container, forward_step


class Trainer:
    """Run upstream's training loop on its model and optimizer; `steps` are those that it ran."""

    def __init__(self, container: Any, watch: Watch, memory: AllocationLog) -> None:
        from megatron.core.enums import ModelType
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.training import get_args, training

        self.args, self.watch, self.memory = get_args(), watch, memory
        self.steps: list[Step] = []
        self.models, self.optimizer, self.scheduler = training.setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            None,
            checkpointing_context={},
            cfg_container=container,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        as_cuda.adam(self.optimizer)
        real = self.optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            memory.phase = "optimizer"
            return real(*args, **kwargs)

        self.optimizer.step = step

    def train(self, forward_step: Callable[..., Any], job: RankJob, tags: Tags) -> None:
        """Run upstream's loop for the job's steps."""
        from megatron.core import num_microbatches_calculator
        from megatron.core.rerun_state_machine import RerunDataIterator
        from megatron.core.utils import get_model_config
        from megatron.training import training

        waiting = iter(job.micro_batches)
        real = training.train_step

        def train_step(*args: Any, **kwargs: Any) -> Any:
            works, collectives = Works(tags), Collectives(job.per_node)
            self.watch.observers = (self.memory, works, collectives)
            self.memory.phase, start = "forward", self.watch.clock
            done = real(*args, **kwargs)
            self.watch.observers = (self.memory,)  # later operations belong to no step
            self.steps.append(Step(start, self.watch.clock, calculator.get(), works, collectives))
            self.memory.phase = "setup"
            calculator.num_micro_batches = next(waiting, calculator.get())
            return done

        calculator: Any = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
        calculator.num_micro_batches = next(waiting)
        batches = RerunDataIterator(_batches(self.args))
        self.args.train_iters = len(job.micro_batches)
        self.args.do_valid = self.args.do_test = False
        with patch.object(training, "train_step", train_step):
            training.train(
                forward_step,
                self.models,
                self.optimizer,
                self.scheduler,
                batches if len(self.models) == 1 else [batches] * len(self.models),
                None,
                None,
                get_model_config(self.models[0]),
                {},
                None,
            )

    def name_owned(self) -> None:
        """Set the kind of weights, gradients and optimizer states."""
        self.memory.set_kind("weights", (p.data for m in self.models for p in m.parameters()))
        self.memory.set_kind("gradients", self._gradients())
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            inner = optimizer.optimizer
            owned = [p for group in inner.param_groups for p in group["params"]]
            owned += [t for state in inner.state.values() for t in state.values()]
            self.memory.set_kind("optimizer", (t for t in owned if isinstance(t, torch.Tensor)))

    def _gradients(self) -> Iterator[torch.Tensor]:
        for model in self.models:
            for buffer in (*model.buffers, *model.expert_parallel_buffers):
                yield buffer.grad_data
            for parameter in model.parameters():
                yield from (g for g in (parameter.grad,) if g is not None)


def _batches(args: Namespace) -> Iterator[dict[str, torch.Tensor]]:
    size = (args.micro_batch_size, args.seq_length)
    while True:
        tokens = torch.zeros(size, dtype=torch.long)
        mask = torch.ones(size)
        yield {"tokens": tokens, "labels": tokens, "loss_mask": mask, "position_ids": tokens}
