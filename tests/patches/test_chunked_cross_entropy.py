"""The loss over the vocabulary: routed to ours in a look-alike, and in the vendored tree."""

from types import SimpleNamespace

import pytest

from .conftest import executed

PATH = "megatron/core/tensor_parallel/cross_entropy.py"
SOURCE = """
def get_tensor_model_parallel_group():
    return "all"


def vocab_parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing=0.0{more}):
    "Words."
    return "upstream's", label_smoothing
"""
GROUP_GIVEN = ", tp_group=None"


@pytest.fixture
def loss(module):
    """A function that makes the loss of a release."""

    def make(version, more):
        module("mqo.megatron.losses", chunked_cross_entropy=lambda *given: given)
        scope = executed("chunked_cross_entropy", PATH, SOURCE.format(more=more), version)
        return scope["vocab_parallel_cross_entropy"]

    return make


@pytest.mark.parametrize(
    ("version", "more"), [("0.10.0", ""), ("0.18.2", ""), ("0.19.2", GROUP_GIVEN)]
)
def test_the_loss_is_ours_unless_labels_are_smoothed(loss, version, more):
    found = loss(version, more)
    assert found("logits", "targets") == ("logits", "targets", "all")
    assert found("logits", "targets", 0.1) == ("upstream's", 0.1)


def test_a_group_that_is_given_counts(loss):
    group = SimpleNamespace()
    assert loss("0.19.2", GROUP_GIVEN)("l", "t", tp_group=group) == ("l", "t", group)
