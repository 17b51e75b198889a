"""Losses over a vocabulary that two processes share."""

from pathlib import Path

import pytest

from ....vendored_tree import run_ranks

pytest.importorskip("megatron.core.tensor_parallel.cross_entropy")


def test_two_ranks_send_sums_alone_and_have_upstreams_loss():
    assert "EQUAL" in run_ranks(Path(__file__).with_name("two_ranks.py"))
