"""The GPU kernels in Triton's interpreter, where this Python has no Triton and .cache/triton has.

test_gpu.py and test_gpu_hadamard.py do all of it themselves where Triton is installed.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ...get_triton import FOLDER, ROOT

pytestmark = pytest.mark.skipif(
    bool(importlib.util.find_spec("triton")) or not FOLDER.exists(),
    reason="Triton is installed: see test_gpu.py"
    if importlib.util.find_spec("triton")
    else f"no Triton in {FOLDER}: python tests/get_triton.py",
)
# Of each format one case that is stored, and any tensor of any; squares and short tails among them.
SOON = """
    test_the_stored_vectors or test_any_tensor or test_a_scalar or test_more_strides
"""
FILES = [str(Path(__file__).with_name(name)) for name in ("test_gpu.py", "test_gpu_hadamard.py")]


def run(*words):
    """What pytest says of these files, with Triton."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words, *FILES],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
    )


def test_each_kernel_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = run("-k", " ".join(SOON.split()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.heavy
def test_all_cases_and_what_is_compiled_ahead_of_time():
    done = run("-m", "")
    assert done.returncode == 0, done.stdout + done.stderr
