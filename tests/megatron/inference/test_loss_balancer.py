"""How the losses of a distillation add up, by hand and against ModelOpt's own balancer."""

import pytest
import torch
from megatron.inference.algos.distillation import LogitsAndIntermediatesLossBalancer as Balancer
from mqo.megatron.run.errors import DistillationError

STUDENT, LOGITS, COSINE, MSE = (
    "student_loss",
    "LogitsKLLoss_0",
    "HiddenStateCosineLoss_1",
    "HiddenStateMSELoss_2",
)


def losses(student=4.0, logits=2.0, **others):
    given = {STUDENT: student, LOGITS: logits, **others}
    return {name: torch.tensor(float(x), requires_grad=True) for name, x in given.items()}


def total(balancer, of):
    """The total, and its gradient to each loss."""
    value = balancer(of)
    grads = torch.autograd.grad(value, list(of.values()), allow_unused=True)
    return value.item(), {n: float(g or 0) for n, g in zip(of, grads, strict=True)}


def test_the_mean_of_the_intermediate_losses_is_scaled_to_the_logits_and_they_count_once():
    of = losses(**{COSINE: 0.5, MSE: 7.5})
    value, grads = total(Balancer(skip_original_loss=True), of)
    assert value == 4  # 2 + 4 * (2 / 4)
    assert grads == {STUDENT: 0, LOGITS: 1, COSINE: 0.25, MSE: 0.25}
    assert total(Balancer(), of)[0] == 8  # 4 + (2 + 2) * (4 / 4)


def test_without_the_original_loss_the_students_is_not_needed():
    of = losses()
    del of[STUDENT]
    assert Balancer(kd_loss_scale=3.0, skip_original_loss=True)(of).item() == 2


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", [STUDENT, LOGITS, COSINE])
def test_what_is_zero_or_not_finite_scales_nothing_and_is_not_scaled(name, bad):
    of = losses(**{COSINE: 8.0}) | {name: torch.tensor(bad)}
    plain = {k: v.item() for k, v in of.items()}
    kd = plain[LOGITS] + (2.0 if name == STUDENT else plain[COSINE])
    student = plain[STUDENT]
    scaled = student if 0 < student < 9 and 0 < kd < 99 else kd
    expected = torch.tensor(student + scaled)
    torch.testing.assert_close(Balancer()(of).detach(), expected, equal_nan=True)


def test_zero_losses_give_a_finite_gradient():
    value, grads = total(Balancer(), losses(student=0, logits=0, **{COSINE: 0}))
    assert value == 0
    assert grads == {STUDENT: 1, LOGITS: 1, COSINE: 1}


def test_the_dict_is_left_alone_and_the_parts_are_told():
    of, balancer = losses(**{COSINE: 0.5, MSE: 7.5}), Balancer()
    before = dict(of)
    balancer(of)
    assert of == before
    assert {k: v.item() for k, v in balancer.parts.items()} == {
        "logits loss": 2,
        "intermediate loss": 4,
    }
    assert not any(part.requires_grad for part in balancer.parts.values())


def test_the_factors_are_those_of_the_reference_if_there_is_one():
    balancer = Balancer(kd_loss_scale=0.5)
    given = []

    def reference(values):
        given.append({name: value.item() for name, value in values.items()})
        return {"lm loss": torch.tensor(8.0), "logits loss": torch.tensor(2.0)} | {
            "intermediate loss": torch.tensor(4.0)
        }

    balancer.reference = reference
    value, grads = total(balancer, losses(student=3, logits=1, **{COSINE: 10}))
    assert given == [{"lm loss": 3, "logits loss": 1, "intermediate loss": 10}]
    # Intermediate: 2 / 4. Together: 8 / (2 + 4 * 2 / 4).
    assert grads == {STUDENT: 1, LOGITS: 0.5 * 2, COSINE: 0.5 * 2 * 0.5}
    assert value == 3 + 0.5 * 2 * (1 + 10 * 0.5)
    assert balancer.parts["logits loss"] == 1
    balancer.reference = None
    assert total(balancer, losses())[0] == 6


@pytest.mark.parametrize("name", [STUDENT, LOGITS])
def test_a_loss_that_is_missing_is_named(name):
    of = losses(**{COSINE: 1})
    del of[name]
    with pytest.raises(DistillationError, match=r"student_loss.*'Logits'"):
        Balancer()(of)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("others", [{}, {COSINE: 0.3}, {COSINE: 0.3, MSE: 5.0}], ids=str)
def test_it_is_modelopts_own_balance(others, skip):
    from modelopt.torch.distill.plugins import megatron as plugin

    theirs = plugin.LogitsAndIntermediatesLossBalancer(0.7, skip)
    expected, their_grads = total(
        lambda of: theirs(dict(of))["kd_loss"], losses(3.1, 1.7, **others)
    )
    value, grads = total(Balancer(0.7, skip), losses(3.1, 1.7, **others))
    assert value == pytest.approx(expected, rel=1e-6)  # fp32
    assert grads == pytest.approx(their_grads, rel=1e-6)
