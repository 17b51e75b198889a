"""Refuse a training length that Megatron would refuse after its start, by a bare assertion.

Megatron counts a training in steps or in samples, never in both. The launcher passes
`--train-samples`, unless the user's own flags have `--train-iters`.
"""

from __future__ import annotations

from mqo.errors import LayoutError
from mqo.launch.command import read_flags
from mqo.launch.config import Experiment
from mqo.launch.flags import length

STEPS = ("train-iters", "lr-decay-iters", "lr-warmup-iters", "lr-wsd-decay-iters")
SAMPLES = ("train-samples", "lr-decay-samples", "lr-warmup-samples", "lr-wsd-decay-samples")


def check_length(experiment: Experiment) -> None:
    """Raise LayoutError for a training without steps, or one that mixes steps and samples."""
    wanted = {**dict.fromkeys(STEPS + SAMPLES, int), "lr-warmup-fraction": float}
    flags = vars(read_flags(experiment.extra_flags, wanted | {"skip-train": False}))
    given = {name for name in wanted if flags[name.replace("-", "_")] is not None}
    if flags["skip_train"]:
        return
    by_step = "train-iters" in given
    unit, others = ("steps", SAMPLES) if by_step else ("samples", STEPS)
    for name, counterpart in zip(others, SAMPLES if others is STEPS else STEPS, strict=True):
        if name in given:
            raise LayoutError(
                f"--{name} was given, but the length of the training is in {unit}",
                expected=f"--{counterpart}",
                help="" if by_step else "To count in steps, also pass --train-iters N",
            )
    count = {"lr-warmup-iters", "lr-warmup-samples"} & given
    if count and "lr-warmup-fraction" in given:
        raise LayoutError(
            f"Both --{count.pop()} and --lr-warmup-fraction were given",
            expected="only one of them",
        )
    if (steps := length(experiment).steps) < 1:
        raise LayoutError(
            f"The training has {steps} steps",
            expected="1 or more",
            help="Change --train-samples (or --train-iters) or --global-batch-size",
        )
