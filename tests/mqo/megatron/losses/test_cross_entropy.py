"""Cross-entropy in chunks: upstream's numbers, and the memory that it may take."""

import pytest
import torch
from mqo.megatron.losses import chunked_cross_entropy

from ....peak import Peak

upstream = pytest.importorskip("megatron.core.tensor_parallel.cross_entropy")

SEQUENCE, BATCH = 24, 2


def drawn(vocabulary, dtype=torch.float32, scale=5.0):
    """Logits [s, b, v] and targets [s, b]."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = scale * torch.randn(SEQUENCE, BATCH, vocabulary, generator=generator)
    return logits.to(dtype), torch.randint(vocabulary, (SEQUENCE, BATCH), generator=generator)


def with_gradient(loss, logits, targets, *more):
    """The loss of each token, and the gradient of a weighted sum."""
    given = logits.clone().requires_grad_()
    # Upstream writes to the logits of its caller, which may not be a leaf.
    found = loss(given * 1, targets, *more)
    weights = torch.linspace(-1, 1, found.numel()).reshape(found.shape)
    return found.detach(), torch.autograd.grad((found * weights).sum(), given)[0]


def by_upstream(logits, targets, group):
    return upstream._VocabParallelCrossEntropy.apply(logits, targets, 0.0, group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [32, 1000, 4096, 5003])
@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_loss_and_gradient_are_upstreams_bit_for_bit(in_chunks, one_rank, rows, vocabulary, dtype):
    in_chunks(rows * vocabulary)
    logits, targets = drawn(vocabulary, dtype)
    targets[3, 1] = -100  # no token
    found = with_gradient(chunked_cross_entropy, logits, targets, one_rank)
    expected = with_gradient(by_upstream, logits, targets, one_rank)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.equal(other)


def test_the_logits_stay_as_they_are_and_need_not_be_contiguous(in_chunks):
    in_chunks(3 * 64)
    logits, targets = drawn(64)
    before = logits.clone()
    found = with_gradient(chunked_cross_entropy, logits, targets)
    turned = logits.transpose(0, 1).contiguous().transpose(0, 1)
    other = with_gradient(chunked_cross_entropy, turned, targets)
    assert logits.equal(before)
    assert all(a.equal(b) for a, b in zip(found, other, strict=True))


def test_infinite_and_missing_numbers_pass_through():
    logits, targets = drawn(64)
    logits[0, 0, 5] = torch.nan
    logits[1, 0, 5], targets[1, 0] = torch.inf, 5
    logits[2, 0, 5], targets[2, 0] = -torch.inf, 5
    loss = chunked_cross_entropy(logits, targets)
    assert loss[:2, 0].isnan().all()
    assert loss[2, 0] == torch.inf
    assert loss.isfinite().sum() == loss.numel() - 3


def peak(loss, logits, targets):
    logits = logits.requires_grad_()
    with Peak(logits, targets) as seen:
        torch.autograd.grad(loss(logits, targets).sum(), logits)
    return seen.bytes


def limit(logits, chunk):
    """Two tensors of logits, two chunks in fp32, and some numbers a token."""
    return 2 * logits.nbytes + 2 * 4 * chunk + 100 * SEQUENCE * BATCH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_tensors_of_logits_are_alive_at_the_peak(in_chunks, one_rank, dtype):
    logits, targets = drawn(8192, dtype)
    chunk = in_chunks(2 * 8192)
    assert peak(chunked_cross_entropy, logits, targets) <= limit(logits, chunk)
    assert peak(chunked_cross_entropy, logits, targets) >= 2 * logits.nbytes  # it does count


# -- the vendored tree, patched ----------------------------------------------------------------


def test_upstreams_function_leads_here_and_smoothed_labels_to_upstreams(one_rank):
    logits, targets = drawn(64)

    def smoothed(loss):
        return with_gradient(lambda *given: loss(*given, 0.1, one_rank), logits, targets)

    routed = upstream.vocab_parallel_cross_entropy
    found = routed(logits.requires_grad_(), targets, tp_group=one_rank)
    assert type(found.grad_fn).__name__ == "_CrossEntropyBackward"
    assert found.equal(chunked_cross_entropy(logits, targets))
    expected = smoothed(upstream._VocabParallelCrossEntropy.apply)
    assert all(a.equal(b) for a, b in zip(smoothed(routed), expected, strict=True))
    assert not expected[0].equal(found)


def test_the_fused_loss_is_upstreams_own(one_rank):
    from megatron.core.fusions import fused_cross_entropy as fused

    logits, targets = drawn(64, torch.bfloat16)
    loss = fused.fused_vocab_parallel_cross_entropy
    made = loss(logits.clone().requires_grad_(), targets, one_rank).grad_fn
    assert type(made).__name__ == "_VocabParallelCrossEntropyBackward"
    found = with_gradient(loss, logits, targets, one_rank)
    expected = with_gradient(chunked_cross_entropy, logits, targets)
    assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
