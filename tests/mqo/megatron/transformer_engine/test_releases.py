"""What the engine's releases make of our factory, each in a process with its real Python code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ....get_packages import ENGINE_WHEELS, ENGINES, ROOT

HERE = Path(__file__).parent
NEWEST, *MIDDLE, OLDEST = ENGINE_WHEELS
# Our code distinguishes the oldest release from the others.
MARKS = {NEWEST: (), OLDEST: pytest.mark.slow} | dict.fromkeys(MIDDLE, pytest.mark.heavy)
releases = pytest.mark.parametrize(
    "version", [pytest.param(version, marks=mark) for version, mark in MARKS.items()]
)


def run(version, *command):
    if not (ENGINES / version).exists():
        pytest.skip(f"no Transformer Engine {version}: python tests/get_packages.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, command)],
        cwd=ROOT,
        env=os.environ | {"MQO_TEST_ENGINE": version, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@releases
def test_the_contract(version):
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-m", "")
    run(version, *words, HERE / "contract.py")


@releases
def test_two_ranks(version, tmp_path):
    """Tensor parallelism, with sequence parallelism and without, and expert parallelism."""
    assert "EQUAL" in run(version, HERE / "ranks.py", tmp_path)
