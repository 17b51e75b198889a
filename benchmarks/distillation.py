"""What a teacher gains at equal tokens, and what it costs in time: student alone and with teacher.

    .venv/bin/python benchmarks/distillation.py TEACHER [--training-config smoke] [--seeds 1 2 3]
        [--modes bf16 FA_linear_mxfp4] [--distillation-config FILE] [-- MEGATRON_FLAG...]

TEACHER is a run that saved, as for --teacher. One run after the other, in runs/; the table goes to
the standard output. A step's time is the median over a run's steps but the first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from mqo.launch.cli import split_flags
from mqo.launch.config import resolve
from mqo.launch.run import run
from mqo.project import Project
from mqo.runs import VALID_LOSS, RunFolder

CONFIG = Path(__file__).resolve().parents[1] / "script/distill_llama32-1b.yaml"
STEP_TIME = "iteration-time"


def main() -> None:
    """Train all runs, and print their results."""
    own, extra = split_flags(sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("teacher", type=Path)
    parser.add_argument("--training-config", default="smoke")
    parser.add_argument("--modes", nargs="+", default=["bf16", "FA_linear_mxfp4"])
    parser.add_argument("--seeds", nargs="+", default=["1", "2", "3"])
    parser.add_argument("--distillation-config", type=Path, default=CONFIG)
    given = parser.parse_args(own)
    print(
        "| mode | teacher | validation loss, a seed each | mean | s a step |\n|---|---|---|---|---|"
    )
    for mode in given.modes:
        means = [row(given, mode, teacher, extra) for teacher in (None, given.teacher)]
        print(f"| {mode} | gain | | {means[0] - means[1]:+.4f} | |", flush=True)


def row(given: argparse.Namespace, mode: str, teacher: Path | None, extra: list[str]) -> float:
    """Train with each seed and print a line; return the mean validation loss, in nats."""
    runs = [train(given, mode, teacher, [*extra, "--seed", seed]) for seed in given.seeds]
    losses = [run.read_metrics()[VALID_LOSS][-1][1] for run in runs]
    step = statistics.median(time for run in runs for time in step_times(run))
    each = " ".join(f"{loss:.4f}" for loss in losses)
    mean = statistics.mean(losses)
    print(
        f"| {mode} | {'yes' if teacher else 'no'} | {each} | {mean:.4f} | {step:.2f} |", flush=True
    )
    return mean


def train(
    given: argparse.Namespace, mode: str, teacher: Path | None, extra: list[str]
) -> RunFolder:
    """Train one run."""
    config = given.distillation_config if teacher else None
    config = resolve(
        "llama32-1b",
        "wikipedia",
        mode,
        given.training_config,
        teacher=teacher,
        distillation_config=config,
        extra_flags=tuple(extra),
    )
    done = run(Project.here(), config, report=lambda text: print(text, file=sys.stderr, flush=True))
    return RunFolder(Path(done.run))


def step_times(run: RunFolder) -> list[float]:
    """Return seconds of each step but the first."""
    return [seconds for _, seconds in run.read_metrics()[STEP_TIME][1:]]


if __name__ == "__main__":
    main()
