"""The divergence in chunks: what whole tensors give, and the memory that it may take."""

import pytest
import torch
from mqo.megatron.losses import chunked_kl

from ....peak import Peak

SEQUENCE, BATCH = 24, 2


def drawn(vocabulary, dtype=torch.float32, scale=4.0):
    """A student's and a teacher's logits, [s, b, v]."""
    generator = torch.Generator().manual_seed(vocabulary)
    shape = (2, SEQUENCE, BATCH, vocabulary)
    student, teacher = scale * torch.randn(shape, generator=generator)
    return student.to(dtype, copy=True), teacher.to(dtype, copy=True)


def whole(student, teacher, temperature):
    """The definition on whole tensors in fp32, in the same order of operations."""

    def log_softmax(logits):
        shifted = logits - logits.amax(-1, keepdim=True)
        return shifted - shifted.exp().sum(-1, keepdim=True).log()

    ours, theirs = (log_softmax(x.float() / temperature) for x in (student, teacher))
    return (theirs.exp() * (theirs - ours)).sum(-1), ours.exp() - theirs.exp()


def weights():
    return torch.linspace(-1, 1, SEQUENCE * BATCH).reshape(SEQUENCE, BATCH)


def with_gradient(student, teacher, *more, **options):
    """The loss of each token, and the gradient of a weighted sum."""
    student = student.clone().requires_grad_()
    found = chunked_kl(student, teacher, *more, **options)
    return found.detach(), torch.autograd.grad((found * weights()).sum(), student)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.parametrize("vocabulary", [32, 1000, 5003])
def test_loss_and_gradient_are_those_of_whole_tensors(
    in_chunks, vocabulary, rows, temperature, dtype
):
    in_chunks(rows * vocabulary)
    student, teacher = drawn(vocabulary, dtype)
    expected, difference = whole(student, teacher, temperature)
    gradient = (difference * weights().unsqueeze(-1) / temperature).to(dtype)
    for overwrite in (False, True):
        found = with_gradient(student, teacher.clone(), temperature, overwrite_teacher=overwrite)
        assert found[0].equal(expected)
        assert found[1].equal(gradient)


def test_only_memory_that_was_given_away_is_written_to(in_chunks):
    in_chunks(5 * 64)
    student, teacher = drawn(64)
    before = student.clone(), teacher.clone()
    _, gradient = with_gradient(student, teacher)
    assert student.equal(before[0])
    assert teacher.equal(before[1])
    student.requires_grad_()
    loss = chunked_kl(student, teacher, overwrite_teacher=True)
    (again,) = torch.autograd.grad((loss * weights()).sum(), student, retain_graph=True)
    assert student.equal(before[0])
    assert again.data_ptr() == teacher.data_ptr()
    assert again.equal(gradient)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss.sum(), student)


def test_memory_that_cannot_hold_the_gradient_stays(in_chunks):
    in_chunks(5 * 64)
    student, teacher = drawn(64)
    _, gradient = with_gradient(student, teacher)
    turned = teacher.transpose(0, 1).contiguous().transpose(0, 1)
    for other in (turned, teacher.double()):
        before = other.clone()
        assert with_gradient(student, other, overwrite_teacher=True)[1].equal(gradient)
        assert other.equal(before)
    # A model that teaches itself.
    before = student.clone().requires_grad_()
    loss = chunked_kl(before, before.detach(), overwrite_teacher=True)
    torch.autograd.grad(loss.sum(), before)
    assert before.equal(student)


def peak(student, teacher):
    student = student.requires_grad_()
    with Peak(student, teacher) as seen:
        loss = chunked_kl(student, teacher, 2.0, overwrite_teacher=True)
        torch.autograd.grad(loss.sum(), student)
    return seen.bytes


def limit(logits, chunk):
    """Two tensors of logits, four chunks in fp32, and some numbers a token."""
    return 2 * logits.nbytes + 4 * 4 * chunk + 100 * SEQUENCE * BATCH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_tensors_of_logits_are_alive_at_the_peak(in_chunks, dtype):
    chunk = in_chunks(8192)
    logits = drawn(8192, dtype)
    assert 2 * logits[0].nbytes <= peak(*logits) <= limit(logits[0], chunk)
