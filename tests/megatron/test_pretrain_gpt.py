"""Parts of the training program that need no training."""

import pytest
import torch


@pytest.fixture
def pretrain_gpt():
    return pytest.importorskip("pretrain_gpt")


def test_the_flops_of_a_step_count_what_is_trained_on(pretrain_gpt, monkeypatch):
    """Neither validation nor a first forward pass."""
    from megatron.training import training

    counted = []
    monkeypatch.setattr(training, "update_seqlen_stats_from_cu_seqlens", counted.append)
    batch = {"cu_seqlens": torch.tensor([[0, 3, 8]]), "max_seqlen": torch.tensor([5])}
    with torch.no_grad():
        pretrain_gpt.packed_params(batch)
    assert not counted
    assert pretrain_gpt.packed_params(batch).max_seqlen_q == 5
    assert [ends.tolist() for ends in counted] == [[0, 3, 8]]
