"""Lengths that Megatron would refuse by an assertion, and those that are taken."""

import pytest
from mqo.errors import LayoutError
from mqo.launch.config import resolve
from mqo.launch.flags import Length, length, shape_flags
from mqo.launch.length import SAMPLES, STEPS, check_length


def experiment(*flags):
    return resolve("llama32-1b", "wikipedia", "bf16", "tiny", extra_flags=flags).experiment


@pytest.mark.parametrize("flags", [("--train-iters", "5"), ("--train-iters=5",)])
def test_a_length_in_steps_replaces_the_launchers(flags):
    of = experiment(*flags)
    check_length(of)
    assert length(of) == Length(steps=5, tokens_per_step=4 * 64)
    assert "--train-samples" not in shape_flags(of)
    assert "--lr-warmup-fraction" in shape_flags(of)


def test_a_length_in_samples_follows_the_launchers():
    assert length(experiment()) == Length(steps=8, tokens_per_step=4 * 64)
    of = experiment("--seq-length", "32", "--train-samples", "40")
    check_length(of)
    assert length(of) == Length(steps=10, tokens_per_step=4 * 32)
    assert shape_flags(of)[-2:] == ["--train-samples", "40"]


@pytest.mark.parametrize("warm_up", [("--lr-warmup-samples", "0"), ("--lr-warmup-samples", "8")])
def test_a_warm_up_replaces_the_launchers(warm_up):
    of = experiment(*warm_up)
    check_length(of)
    assert "--lr-warmup-fraction" not in shape_flags(of)


def test_all_may_be_in_steps():
    check_length(experiment(*(word for name in STEPS for word in (f"--{name}", "4"))))


@pytest.mark.parametrize("name", STEPS[1:])
def test_steps_in_a_training_counted_in_samples_are_refused_by_name(name):
    with pytest.raises(LayoutError, match=f"--{name} .*--{name.replace('iters', 'samples')}"):
        check_length(experiment(f"--{name}", "4"))


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_in_a_training_counted_in_steps_are_refused_by_name(name):
    with pytest.raises(LayoutError, match=f"--{name} .*--{name.replace('samples', 'iters')}"):
        check_length(experiment("--train-iters", "4", f"--{name}", "4"))


def test_two_warm_ups_are_refused():
    with pytest.raises(LayoutError, match=r"--lr-warmup-samples .*--lr-warmup-fraction"):
        check_length(experiment("--lr-warmup-samples", "4", "--lr-warmup-fraction", "0.1"))


@pytest.mark.parametrize(
    "flags",
    [
        *(("--train-iters", n) for n in ("abc", "1.5", "0", "-3", "")),
        *(("--train-samples", n) for n in ("abc", "0", "3")),
        ("--train-samples", "0", "--global-batch-size", "0"),
        ("--train-iters",),
    ],
)
def test_a_length_that_is_no_number_of_steps_is_refused(flags):
    with pytest.raises(LayoutError):
        check_length(experiment(*flags))


def test_a_run_that_trains_nothing_has_no_length():
    check_length(experiment("--skip-train", "--train-samples", "0"))
