"""Parts of the training program that need no training."""

import pytest
import torch


@pytest.fixture
def batches():
    return pytest.importorskip("megatron.inference.gpt.batches")


def test_the_flops_of_a_step_count_what_is_trained_on(batches, monkeypatch):
    """Neither validation nor a first forward pass."""
    from megatron.training import training

    counted = []
    monkeypatch.setattr(training, "update_seqlen_stats_from_cu_seqlens", counted.append)
    batch = {"cu_seqlens": torch.tensor([[0, 3, 8]]), "max_seqlen": torch.tensor([5])}
    with torch.no_grad():
        batches.packed_params(batch)
    assert not counted
    assert batches.packed_params(batch).max_seqlen_q == 5
    assert [ends.tolist() for ends in counted] == [[0, 3, 8]]
