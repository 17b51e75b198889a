"""The loss of a micro-batch: masked, balanced, reported."""

import pytest
import torch
from megatron.inference.gpt import loss_func as module
from megatron.inference.gpt.loss_func import loss_func

from .conftest import BATCH, SEQUENCE, mode

PLAIN = torch.nn.Linear(1, 1)  # any model that learns from no teacher


def test_the_language_models_loss_is_a_mean_over_what_counts(one_process):
    output = torch.tensor([[1.0, 2.0], [3.0, 100.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    loss, report = loss_func(mask, PLAIN, output)
    assert loss.item() == 2
    assert {name: x.item() for name, x in report.items()} == {"lm loss": 2}
    assert not report["lm loss"].requires_grad
    (gradient,) = torch.autograd.grad(loss, output)
    torch.testing.assert_close(gradient, mask / 3)


def test_a_batch_of_which_nothing_counts_has_a_loss_of_zero(one_process):
    output = torch.ones(2, 3, requires_grad=True)
    loss, report = loss_func(torch.zeros(2, 3), PLAIN, output)
    assert (loss.item(), report["lm loss"].item()) == (0, 0)
    assert not torch.autograd.grad(loss, output)[0].any()


@pytest.fixture(scope="module")
def students(make, teacher, tmp_path_factory):
    """Two students of one teacher: {whether it does without its own loss: student}."""
    folder, made = tmp_path_factory.mktemp("configurations"), {}
    for skip in (True, False):
        (folder / f"{skip}.yaml").write_text(
            f"skip_lm_loss: {str(skip).lower()}\nkd_loss_scale: 0.5\n"
            "intermediate_layer_pairs: [[decoder.layers.1, decoder.layers.2]]\n"
        )
        flags = ("--export-kd-teacher-load", teacher[1], "--export-kd-cfg", folder / f"{skip}.yaml")
        made[skip] = make(*flags)
    return made


MASK = torch.ones(BATCH, SEQUENCE)
MASK[0, 5:] = 0


def step(model, tokens, mask=MASK):
    loss, report = loss_func(mask, model, model(*tokens[0], labels=tokens[1]))
    return loss, {name: value.item() for name, value in report.items()}


def test_a_student_is_trained_on_the_balanced_loss_and_its_parts_are_reported(students, tokens):
    loss, report = step(mode(students[False], training=True), tokens)
    assert report.keys() == {"lm loss", "kd loss", "logits loss", "intermediate loss"}
    assert loss.item() == report["kd loss"]
    # Both parts together are scaled to the student's own, and weigh half of it.
    assert report["kd loss"] == pytest.approx(1.5 * report["lm loss"], rel=1e-6)
    assert 0 < report["logits loss"] < report["lm loss"]


def test_a_loss_that_is_not_trained_on_is_reported_without_a_gradient(students, tokens):
    model = mode(students[True], training=True)
    loss, report = step(model, tokens)
    assert loss.item() == pytest.approx(2 * report["logits loss"], rel=1e-6)
    assert not model(*tokens[0], labels=tokens[1]).requires_grad
    evaluated = step(mode(students[True], training=False), tokens)[1]
    assert report["lm loss"] == pytest.approx(evaluated["lm loss"], rel=1e-6)


@pytest.mark.parametrize("skip", [True, False])
def test_evaluation_is_the_language_models_loss(students, tokens, skip):
    model = mode(students[skip], training=False)
    loss, report = step(model, tokens)
    expected = (model(*tokens[0], labels=tokens[1]) * MASK).sum() / MASK.sum()
    assert report == {"lm loss": pytest.approx(expected.item(), rel=1e-6)}
    assert loss.item() == report["lm loss"]


def test_what_does_not_count_has_no_part_in_the_distillation(students, tokens):
    model = mode(students[True], training=True)
    before = step(model, tokens)[1]
    other = [tokens[0][0].clone(), *tokens[0][1:]]
    other[0][0, 5:] = 0  # causal: it is behind all that counts of its sequence
    after = step(model, (other, tokens[1]))[1]
    assert after == pytest.approx(before, rel=1e-5)


def test_a_student_on_a_batch_of_which_nothing_counts_learns_nothing(students, tokens):
    model = mode(students[False], training=True)
    loss, report = step(model, tokens, torch.zeros_like(MASK))
    loss.backward()
    assert set(report.values()) == {0}
    assert not any(w.grad.any() for w in model.parameters() if w.grad is not None)
    model.zero_grad()


class Group:
    """Stands for ranks of which this is one; all others have the same as it."""

    def __init__(self, ranks):
        self.ranks = ranks

    def size(self):
        return self.ranks


@pytest.fixture
def ranks(monkeypatch):
    """A function that has this be one of so many ranks, {kind: number}."""

    def be(context=1, data=1):
        groups = {"context": Group(context), "data": Group(data)}

        class State:
            get_context_parallel_world_size = staticmethod(lambda: context)
            get_context_parallel_group = staticmethod(lambda: groups["context"])
            get_data_parallel_group = staticmethod(lambda: groups["data"])

        def reduce(own, group):
            # The others have 1 more each, where it is a sum that they have.
            own.mul_(group.ranks) if group is groups["data"] else own.add_(group.ranks - 1)

        monkeypatch.setattr(module, "parallel_state", State)
        monkeypatch.setattr(module, "all_reduce", reduce)

    return be


def test_context_ranks_share_a_mean_and_each_has_its_part_of_the_gradient(ranks):
    ranks(context=2)
    output = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    loss, report = loss_func(torch.ones(1, 3), PLAIN, output)
    # The other rank's token has a loss of 1: (6 + 1) / (3 + 1).
    assert loss.item() == report["lm loss"].item() == 7 / 4
    assert torch.autograd.grad(loss, output)[0].tolist() == [[0.25] * 3]


def test_the_report_is_a_mean_over_data_ranks_and_the_loss_is_not(ranks):
    ranks(data=4)
    output = torch.tensor([[1.0, 3.0]])
    loss, report = loss_func(torch.ones(1, 2), PLAIN, output)
    assert (loss.item(), report["lm loss"].item()) == (2, 2)
