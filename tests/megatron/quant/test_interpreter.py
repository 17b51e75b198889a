"""The GPU kernels in Triton's interpreter, where this Python has no Triton and .cache/triton has.

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
# Rows and columns of mx blocks, HiF8, both axes at once; of stochastic rounding one.
SOON = """
    test_every_scale_rule and floor or test_the_tensor_scale or test_the_operators_keep
    or test_out_of_any_strides or test_tiles and dtype1 and stochastic and mxfp8
"""


def run(*words):
    """What pytest says of test_gpu.py, with Triton."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
    )


def test_each_kernel_in_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = run("-k", " ".join(SOON.split()), str(Path(__file__).with_name("test_gpu.py")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout and "skipped" not in done.stdout


@pytest.mark.heavy
def test_all_cases_and_what_is_compiled_ahead_of_time():
    done = run("-m", "", str(Path(__file__).with_name("test_gpu.py")))
    assert done.returncode == 0, done.stdout + done.stderr
