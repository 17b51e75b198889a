"""The benchmarks of the GPU kernels, where this Python has no Triton and .cache/triton has."""

from pathlib import Path

import pytest

from ..interpreter import only_without_triton, run

pytestmark = only_without_triton
HERE = Path(__file__).parent


def assert_run(name, *words):
    """The tests of a file pass, and none is skipped."""
    done = run([HERE / name], *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.slow
def test_kernels_compiled_ahead():
    assert_run("test_kernels.py")


@pytest.mark.heavy
def test_all_kernels_compiled_ahead():
    assert_run("test_kernels.py", "-m", "heavy")


@pytest.mark.slow
def test_what_waits_for_a_gpu_is_rehearsed():
    assert_run("test_gpu_all.py", "-m", "slow or not slow")
