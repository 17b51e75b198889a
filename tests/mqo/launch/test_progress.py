"""What is said of a training while it runs, read from metrics of our own."""

import json

import pytest
from mqo.launch.config import resolve
from mqo.launch.progress import Progress


@pytest.fixture
def watch(tmp_path):
    """A function that gives the progress of a cell, and one that adds rows to its metrics."""
    metrics = tmp_path / "metrics.jsonl"

    def add(*rows):
        with metrics.open("a") as lines:
            for step, name, value in rows:
                row = {"iteration": step, "name": name, "value": value}
                lines.write(json.dumps(row) + "\n")

    def start(training="tiny", *flags, **rest):
        made = resolve(
            "llama32-1b", "wikipedia", "bf16", training, extra_flags=tuple(flags), **rest
        )
        return Progress(made.experiment, metrics), add

    return start


def test_the_first_step_each_validation_and_the_last_step_have_lines(watch):
    progress, add = watch()  # 8 steps of 256 tokens
    assert progress.line() == "  step      0/8  starting"
    add((1, "lm loss", 8.0), (2, "lm loss", 7.5), (2, "iteration-time", 0.5))
    assert progress.update() == ["  step      1/8  loss 8.0000"]
    assert progress.line() == "  step      2/8  loss 7.5000  512 tokens/s  0:03 left"
    add((4, "lm loss validation", 7.25))
    assert progress.update() == ["  step      4/8  validation loss 7.2500"]
    add((8, "lm loss", 7.0))
    assert progress.update() == ["  step      8/8  loss 7.0000  512 tokens/s"]
    assert progress.update() == []


def test_the_two_validations_of_the_last_step_are_told_apart(watch):
    progress, add = watch()
    add((4, "lm loss validation", 7.5), (8, "lm loss validation", 7.25))
    add((8, "lm loss validation", 7.5))
    assert [line.split("  ", 3)[-1].strip() for line in progress.update()] == [
        "4/8  validation loss 7.5000",
        "8/8  validation loss 7.2500",
        "8/8  final validation loss 7.5000",
    ]
    assert progress.valid == 7.5


def test_the_time_left_is_that_of_the_last_steps_and_not_of_the_start(watch):
    progress, add = watch("smoke")
    add((1, "lm loss", 8.0), (1, "iteration-time", 1000.0))
    for step in range(2, 41):
        add((step, "lm loss", 8.0), (step, "iteration-time", 1.0 if step != 35 else 60.0))
    progress.update()
    assert progress.seconds_left == 120


def test_a_long_schedule_fits_80_columns(watch):
    progress, add = watch("standard", checkpoint=None)
    add((369_000, "lm loss", 10.123456), (369_000, "iteration-time", 1234.5))
    (line,) = progress.update()
    add((369_000, "lm loss", 10.123456))
    progress.update()
    assert len(line) <= 80 and len(progress.line()) <= 80
    assert progress.line().endswith(" left")


def test_a_run_that_exits_early_has_less_time_left(watch):
    progress, add = watch("smoke", "--exit-interval", "12")
    add((2, "lm loss", 8.0), (2, "iteration-time", 2.0))
    progress.update()
    assert progress.seconds_left == 20
    add((12, "lm loss", 7.0))
    assert progress.update() == ["  step     12/160  loss 7.0000  512 tokens/s"]


def test_a_student_is_shown_by_what_it_is_trained_on(watch, tmp_path):
    progress, add = watch("tiny", teacher=tmp_path)
    add((1, "logits loss", 9.0), (1, "kd loss", 0.75))
    assert progress.update() == ["  step      1/8  loss 0.7500"]
