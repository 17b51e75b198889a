"""The kernels in Triton's interpreter, where this Python has no Triton and .cache/triton has.

test_gpu.py does all of it itself where Triton is installed.
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
# A case of each kind of scale, and what else is quick.
SOON = "test_every_scale or test_backward or test_blocks or test_probabilities or test_it_says"


def run(*words):
    """What pytest says of that file, with Triton."""
    file = str(Path(__file__).with_name("test_gpu.py"))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words, file],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
    )


def test_the_kernels_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = run("-k", SOON)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.heavy
def test_all_cases_and_what_is_compiled_ahead_of_time():
    done = run("-m", "")
    assert done.returncode == 0, done.stdout + done.stderr
