"""What balancing a distillation over whole steps costs, against balancing each micro-batch.

    OMP_NUM_THREADS=1 .venv/bin/python benchmarks/distillation_steps.py [--stages 2]
        [--micro-batches 8] [--rounds 12] [--teacher-layers 8] [--teacher-width 512]

Student and teacher are GPTs with random weights. The losses are the student's own, the logits' and
a pair of layers (MSE). Each round times one step of each way, in turns: `micro_batch`, one pass;
`step`, with the first forward pass (docs/distillation.md); and `step` without the kept outputs of
the teacher, which then runs in both passes. The table has the median time, the median over rounds
of its ratio to `micro_batch`, and by how much a step raises the peak memory of the first rank's
process, which is known to some MiB. Two stages are two processes.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "Megatron-LM/examples/parallelism"))

import torch
import world  # first of Megatron: it makes this tree's the one that is found
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.inference.algos import distillation
from megatron.inference.gpt import steps
from megatron.inference.gpt.loss_func import loss_func
from modelopt.torch import distill as mtd
from peak_memory import raised_bytes
from torch import Tensor

CONFIGURATION = """
skip_lm_loss: false
intermediate_layer_pairs: [[decoder.final_layernorm, decoder.final_layernorm, mse]]
"""
VOCABULARY, SEQUENCE, BATCH = 4096, 256, 1
MICRO_BATCH, STEP, AGAIN = "micro_batch", "step", "step, teacher runs twice"

Batch = dict[str, Tensor]


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=1, choices=(1, 2))
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--student-layers", type=int, default=4)
    parser.add_argument("--student-width", type=int, default=256)
    parser.add_argument("--teacher-layers", type=int, default=8)
    parser.add_argument("--teacher-width", type=int, default=512)
    given = parser.parse_args()
    world.run(partial(measure, given), processes=given.stages)


def measure(given: argparse.Namespace) -> None:
    """Run all rounds on one rank; the first prints."""
    with world.groups(pipeline_model_parallel_size=given.stages):
        student = build(given)
        times = {way: [] for way in WAYS}
        for count in range(given.rounds + 1):
            for way, run in WAYS.items():
                torch.distributed.barrier()
                start = time.perf_counter()
                run(student, given)
                torch.distributed.barrier()
                if count:  # the first round is a warm-up
                    times[way].append(time.perf_counter() - start)
        memory = {}
        for way, run in WAYS.items():
            student.zero_grad()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # what earlier steps freed, glibc holds
            memory[way] = raised_bytes(partial(run, student, given))
        if torch.distributed.get_rank() == 0:
            show(given, times, memory)


def show(given: argparse.Namespace, times: dict[str, list[float]], memory: dict[str, int]) -> None:
    """Print the table of one rank."""
    print(
        f"{given.stages} stages, {given.micro_batches} micro-batches, student "
        f"{given.student_layers} x {given.student_width}, teacher {given.teacher_layers} x "
        f"{given.teacher_width}, {given.rounds} rounds, {torch.get_num_threads()} threads per "
        f"process, {platform.machine()}, torch {torch.__version__}\n"
    )
    print("| way | s per step | ratio | peak, MiB |\n|---|---|---|---|")
    for way, seconds in times.items():
        pairs = zip(seconds, times[MICRO_BATCH], strict=True)
        ratio = statistics.median(own / other for own, other in pairs)
        print(
            f"| {way} | {statistics.median(seconds):.3f} | {ratio:.2f} | "
            f"{memory[way] / 2**20:.0f} |",
            flush=True,
        )


def by_micro_batch(student: torch.nn.Module, given: argparse.Namespace) -> None:
    """Run a step in one pass."""
    student.balances_steps = False
    train(student, given)


def by_step(student: torch.nn.Module, given: argparse.Namespace) -> None:
    """Run a step with its first pass."""
    student.balances_steps = True
    train(student, given)


def with_teacher_again(student: torch.nn.Module, given: argparse.Namespace) -> None:
    """Run a step with its first pass, and keep nothing of it but the losses."""
    with patch.object(steps, "TeacherOutputs", _Nothing):
        by_step(student, given)


class _Nothing(steps.TeacherOutputs):
    """Keeps no outputs, so the teacher runs in each pass."""

    def _keep(self, *of: object) -> None:
        pass

    def repeated(self):  # noqa: ANN202
        return self.kept()


WAYS: dict[str, Callable[[torch.nn.Module, argparse.Namespace], None]] = {
    MICRO_BATCH: by_micro_batch,
    STEP: by_step,
    AGAIN: with_teacher_again,
}


def build(given: argparse.Namespace) -> mtd.DistillationModel:
    """Return this stage's part of a student that has a teacher."""
    torch.manual_seed(1)
    student = gpt(given.student_layers, given.student_width, given.stages)
    teacher = gpt(given.teacher_layers, given.teacher_width, given.stages)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(CONFIGURATION)
        file.flush()
        config = distillation.load_distillation_config(file.name, student.config, teacher.config)
    mode = {"teacher_model": teacher} | {k: config[k] for k in ("criterion", "loss_balancer")}
    student = mtd.convert(student, mode=[("kd_loss", mode)])
    distillation.adjust_distillation_model_for_mcore(student, config)
    student.train()
    return student


def gpt(layers: int, width: int, stages: int) -> GPTModel:
    """Return this stage's part of a model, in fp32."""
    config = world.config(
        num_layers=layers,
        hidden_size=width,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        VOCABULARY,
        SEQUENCE,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).to(world.accelerator_type())


def train(student: torch.nn.Module, given: argparse.Namespace) -> None:
    """Run the passes of one step."""
    student.zero_grad()
    wide = {}
    if given.stages > 1:
        wide["adjust_tensor_shapes_fn"] = distillation.widened_shapes(student)
    steps.with_steps(get_forward_backward_func())(
        forward_step_func=forward_step,
        data_iterator=batches(given.micro_batches),
        model=[student],
        num_microbatches=given.micro_batches,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
        **wide,
    )


def batches(count: int) -> Iterator[Batch]:
    """Yield micro-batches of random tokens."""
    drawn = torch.Generator().manual_seed(3)
    for _ in range(count):
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=drawn)
        mask = torch.ones(BATCH, SEQUENCE)
        labels = tokens[:, 1:].contiguous()
        yield {"tokens": tokens[:, :-1], "labels": labels, "loss_mask": mask}


def forward_step(data: Iterator[Batch], model: torch.nn.Module) -> tuple[Tensor, partial]:
    """Run a micro-batch, as distill_gpt.py does."""
    batch = {name: tensor.to(world.accelerator_type()) for name, tensor in next(data).items()}
    positions = torch.arange(SEQUENCE, device=world.accelerator_type()).expand(BATCH, -1)
    output = model(batch["tokens"], positions, None, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"], model)


if __name__ == "__main__":
    main()
