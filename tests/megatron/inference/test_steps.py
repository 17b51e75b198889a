"""A distillation's step is the same however its batch is cut into micro-batches and ranks."""

import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from megatron.inference.gpt.loss_func import loss_func
from megatron.inference.gpt.steps import with_steps
from mqo.megatron.layers import label_layers
from mqo.project import Project
from mqo.quant import config as quant_config
from mqo.quant.progress import set_step

from ... import forking
from .conftest import BATCH, FLAGS, SEQUENCE, VOCABULARY, mode

OWN = "skip_lm_loss: false"
BOTH = (
    "intermediate_layer_pairs: [[decoder.layers.2, decoder.layers.3], "
    "[decoder.final_layernorm, decoder.final_layernorm, mse]]"
)
CONFIGURATIONS = {
    "logits": "",
    "all": f"{OWN}\n{BOTH}\nkd_loss_scale: 0.7\ntemperature: 2",
    "micro_batch": f"{OWN}\n{BOTH}\nbalance: micro_batch",
}
# fp32 sums in another order; the largest that was seen is 7e-7.
TOLERANCE = 1e-6


# -- gradients of one step, in one process and in two


@pytest.fixture(scope="module")
def deviations(tmp_path_factory):
    """{(stages, tensor ranks, processes): {configuration: {cut: deviation}}}."""
    folder = tmp_path_factory.mktemp("configurations")
    for name, text in CONFIGURATIONS.items():
        (folder / f"{name}.yaml").write_text(text)
    demos = Project.here().tree / "examples/parallelism"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def run(layout):
        program = [Path(__file__).with_name("step_ranks.py"), demos, folder, *layout]
        done = forking.run([sys.executable, *program], env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
        return json.loads(line.removeprefix("FOUND"))

    return {layout: run(layout) for layout in CUTS}


ONE_RANK = ["1 x 1", "1 x 4"]
# {(stages, tensor ranks, processes): cuts}; the first writes what the others are compared with.
CUTS = {
    (1, 1, 1): ONE_RANK,
    (1, 1, 2): ["2 x 1", "2 x 4"],
    (2, 1, 2): ONE_RANK,
    (1, 2, 2): ONE_RANK,
}
LAYOUTS = ["one_process", "data_ranks", "pipeline", "sequence_parallel"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", CUTS, ids=LAYOUTS)
@pytest.mark.parametrize("name", [name for name in CONFIGURATIONS if name != "micro_batch"])
def test_a_step_does_not_depend_on_how_its_batch_is_cut(deviations, layout, name):
    found = deviations[layout][name]
    assert list(found) == CUTS[layout]
    assert max(found.values()) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("layout", CUTS, ids=LAYOUTS)
def test_balanced_by_micro_batch_it_does(deviations, layout):
    """Also shows that the comparison finds a difference."""
    cut = [x for name, x in deviations[layout]["micro_batch"].items() if name != "1 x 1"]
    assert min(cut) > 1e-2


# -- the two passes, in one process

PAIRS = "intermediate_layer_pairs: [[decoder.layers.1, decoder.layers.1]]"
DROPOUT = [flag if flag != "0" else "0.1" for flag in FLAGS]


@pytest.fixture(scope="module")
def student(make, teacher, tmp_path_factory):
    """A function that builds a student by the text of its configuration."""
    path = tmp_path_factory.mktemp("configuration") / "kd.yaml"

    def build(text, base=FLAGS):
        path.write_text(text)
        flags = ("--export-kd-teacher-load", teacher[1], "--export-kd-cfg", path)
        model = mode(make(*flags, base=base), training=True)
        label_layers(model)
        return model

    return build


class Schedule:
    """Upstream's schedule, which notes what it was asked for and what it returned."""

    def __init__(self):
        self.reports, self.grads_enabled = [], []

    def __call__(self, **given):
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.grads_enabled.append(torch.is_grad_enabled())
        found = get_forward_backward_func()(**given)
        self.reports.append((given["forward_only"], found))
        return found

    @property
    def passes(self):
        """Whether each pass was a forward pass alone."""
        return [forward_only for forward_only, _ in self.reports]


def data(count):
    drawn = torch.Generator().manual_seed(3)
    for i in range(count):
        tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=drawn)
        mask = torch.ones(BATCH, SEQUENCE)
        mask[0, 4 + i :] = 0
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:].contiguous(), "loss_mask": mask}


def forward_step(iterator, model):
    batch = next(iterator)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    output = model(batch["tokens"], positions, None, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"], model)


def step(model, count, schedule=None, *, forward_only=False):
    """Run a step of `count` micro-batches; return the schedule that ran it."""
    schedule = schedule or Schedule()
    model.zero_grad()
    with_steps(schedule)(
        forward_step_func=forward_step,
        data_iterator=data(count),
        model=[model],
        num_microbatches=count,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )
    return schedule


@pytest.mark.parametrize(
    "text, count, passes",
    [
        ("", 3, [False]),
        (OWN, 1, [False]),
        (PAIRS, 1, [False]),
        (OWN, 3, [True, False]),
        (PAIRS, 3, [True, False]),
        (f"{OWN}\nbalance: micro_batch", 3, [False]),
    ],
)
def test_a_first_pass_runs_only_if_the_losses_have_to_be_known(student, text, count, passes):
    schedule = step(student(text), count)
    assert schedule.passes == passes
    assert schedule.grads_enabled == [not forward_only for forward_only in passes]


def test_evaluation_is_left_as_it_is(student):
    model = mode(student(OWN), training=False)
    schedule = step(model, 2, forward_only=True)
    assert schedule.passes == [True]
    assert [set(report) for report in schedule.reports[0][1]] == [{"lm loss"}] * 2


def with_values(reports):
    return [{name: value.item() for name, value in report.items()} for report in reports]


RANDOM = '[quantizer]\nrounding = "stochastic"\n'


@pytest.mark.parametrize("base", [FLAGS, DROPOUT], ids=["no_dropout", "dropout"])
@pytest.mark.parametrize("rounding", ["", RANDOM], ids=["nearest", "stochastic"])
def test_both_passes_compute_the_same_losses(student, quantized, tmp_path, base, rounding):
    with (tmp_path / "quant.toml").open("a") as options:
        options.write(rounding)
    quant_config.reset()
    model = student(f"{OWN}\n{PAIRS}", base)
    firsts = []
    for number in (1, 2):
        set_step(number)
        (_, first), (_, second) = step(model, 3).reports
        for before, after in zip(with_values(first), with_values(second), strict=True):
            del before["kd loss"], after["kd loss"]  # the factors of the first pass are not used
            assert before == after
        firsts.append(with_values(first))
    # Steps differ in their random numbers, so the comparison above can fail.
    assert (firsts[0] == firsts[1]) == (base is FLAGS and not rounding)


def test_the_loss_of_a_step_has_the_balance_that_is_documented(student):
    _, reports = step(student(f"{OWN}\n{PAIRS}\nkd_loss_scale: 0.5"), 4).reports[1]
    means = {name: sum(r[name].item() for r in reports) / 4 for name in reports[0]}
    assert means["kd loss"] == pytest.approx(1.5 * means["lm loss"], rel=1e-6)  # fp32
    each = [report["kd loss"].item() / report["lm loss"].item() for report in reports]
    assert max(each) - min(each) > 1e-3  # a micro-batch by itself is not balanced


def test_a_loss_outside_of_a_step_is_balanced_by_itself(student):
    model = student(OWN)

    def outside():
        output, loss = forward_step(data(1), model)
        return with_values([loss(output)[1]])

    before = outside()
    step(model, 3)
    assert outside() == before


def test_the_first_pass_is_not_recorded(student, quantized):
    calls = []
    for balance in ("step", "micro_batch"):
        quantized.reset()
        quantized.begin_step(1, every=1, dump=())
        step(student(f"{OWN}\nbalance: {balance}"), 2)
        quantized.end_step()
        calls.append(quantized.entries())
    assert [r.key for r in calls[0]] == [r.key for r in calls[1]]
    assert [(r.calls, r.measured) for r in calls[0]] == [(r.calls, r.measured) for r in calls[1]]
    assert {r.calls for r in calls[0]} == {2}


def test_the_teachers_layers_run_once_a_micro_batch_and_the_students_twice(student):
    model = student(f"{OWN}\n{PAIRS}")
    ran = []
    for name, whose in (("student", model), ("teacher", model.teacher_model)):
        layer = whose.decoder.layers[0]
        layer.register_forward_hook(lambda *of, name=name: ran.append(name))
    step(model, 3)
    assert (ran.count("student"), ran.count("teacher")) == (6, 3)


def test_micro_batches_have_teachers_outputs_of_their_own(student, monkeypatch):
    """Their gradients are those of a teacher that runs again."""
    from megatron.inference.gpt import steps

    model = student(f"{OWN}\n{PAIRS}")

    def gradients():
        step(model, 3)
        return {name: w.grad for name, w in model.named_parameters() if w.grad is not None}

    with_kept = gradients()
    monkeypatch.setattr(steps.TeacherOutputs, "repeated", steps.TeacherOutputs.kept)
    run_again = gradients()
    assert with_kept.keys() == run_again.keys() != set()
    for name, gradient in with_kept.items():
        assert gradient.equal(run_again[name]), name


@pytest.mark.parametrize("fails_in", [1, 2])
def test_a_step_that_fails_leaves_the_model_as_it_was(student, fails_in):
    model = student(OWN)

    class Fails(Schedule):
        def __call__(self, **given):
            found = super().__call__(**given)
            if len(self.reports) == fails_in:
                raise RuntimeError
            return found

    with pytest.raises(RuntimeError):
        step(model, 2, Fails())
    assert not hasattr(model, "kd_step")
    assert "forward" not in vars(model.teacher_model.decoder)
    assert not model.teacher_model.decoder._forward_hooks
    assert step(model, 2).passes == [True, False]
