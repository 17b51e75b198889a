"""Losses over a vocabulary that two processes share."""

import os
import sys
from pathlib import Path

import pytest
from mqo.project import Project

from .... import forking

TREE = Project.here().tree
pytest.importorskip("megatron.core.tensor_parallel.cross_entropy")


def test_two_ranks_send_sums_alone_and_have_upstreams_loss():
    program = Path(__file__).with_name("two_ranks.py")
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = forking.run([sys.executable, program, TREE / "examples/parallelism"], env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EQUAL" in done.stdout
