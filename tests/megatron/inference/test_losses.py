"""The losses between two layers' outputs: by definition, and against ModelOpt's own."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.inference.algos.distillation import (
    HiddenStateCosineLoss,
    HiddenStateMSELoss,
    LogitsKLLoss,
    Projection,
)
from modelopt.torch.distill.plugins import megatron as plugin

from ... import forking
from .conftest import PROJECT

CONFIG = SimpleNamespace(
    sequence_parallel=False, tensor_model_parallel_size=1, hidden_size=24, mtp_num_layers=None
)
WIDER = SimpleNamespace(hidden_size=40)


def outputs(width=24, teacher_width=None, scale=4.0):
    """What a student's and a teacher's layer gave: [s, b, width]."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 3, width), (5, 3, teacher_width or width))
    made = [scale * torch.randn(shape, generator=generator) for shape in shapes]
    return made[0].requires_grad_(), made[1]


def with_gradient(loss, student):
    """[b, s], and the gradient of a weighted sum of it."""
    loss = loss[0] if isinstance(loss, tuple) else loss
    weights = torch.linspace(0.1, 1, loss.numel()).reshape(loss.shape)
    return loss.detach(), torch.autograd.grad((loss * weights).sum(), student)[0]


@pytest.mark.parametrize("overwrite", [True, False])
def test_the_teachers_logits_are_overwritten_only_where_that_is_asked(overwrite):
    student, teacher = outputs()
    before = teacher.clone()
    LogitsKLLoss(CONFIG, overwrite_targets=overwrite)(student, teacher).sum().backward()
    assert teacher.equal(student.grad if overwrite else before)


PAIRS = [
    (LogitsKLLoss, plugin.LogitsKLLoss, {}),
    (LogitsKLLoss, plugin.LogitsKLLoss, {"temperature": 2.0}),
    (HiddenStateCosineLoss, plugin.HiddenStateCosineLoss, {}),
    (HiddenStateMSELoss, plugin.MSELoss, {}),
]


@pytest.mark.parametrize("ours, theirs, options", PAIRS, ids=lambda x: getattr(x, "__name__", ""))
def test_value_and_gradient_are_modelopts(ours, theirs, options):
    student, teacher = outputs()
    found = with_gradient(ours(CONFIG, **options)(student, teacher), student)
    expected = with_gradient(theirs(CONFIG, **options)(student, teacher), student)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # fp32, in another order


@pytest.mark.parametrize("loss", [LogitsKLLoss, HiddenStateCosineLoss, HiddenStateMSELoss])
def test_equal_outputs_lose_nothing_and_a_bias_beside_is_passed_over(loss):
    student, _ = outputs()
    found = loss(CONFIG)((student, None), (student.clone(), None))
    assert found.abs().max() < 1e-6


def test_logits_far_apart_and_in_bf16_stay_finite():
    student, teacher = (x.bfloat16() for x in outputs(scale=1e4))
    found = LogitsKLLoss(CONFIG)(student, teacher)
    assert found.dtype == torch.float32
    assert found.isfinite().all()


@pytest.mark.parametrize("loss", [HiddenStateCosineLoss, HiddenStateMSELoss])
def test_a_projection_is_learnt_where_widths_differ(loss):
    torch.manual_seed(0)
    projection = Projection(CONFIG, WIDER)
    assert projection.weight.std().item() == pytest.approx(0.01, rel=0.1)  # 960 draws
    assert not projection.bias.any()
    made = loss(CONFIG, projection)
    student, teacher = outputs(teacher_width=40)
    made(student, teacher).sum().backward()
    assert student.grad.any()
    assert all(weight.grad.any() for weight in made.parameters())
    assert not list(loss(CONFIG).parameters())


def test_two_ranks_send_sums_alone_and_have_the_loss_of_one():
    program = Path(__file__).with_name("two_ranks.py")
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = forking.run([sys.executable, program, PROJECT.tree / "examples/parallelism"], env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EQUAL" in done.stdout
