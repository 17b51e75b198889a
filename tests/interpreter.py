"""Runs tests of Triton kernels where this Python has no Triton and .cache/triton has."""

import importlib.util
import os
import subprocess
import sys

import pytest

from .get_packages import ROOT, TRITON

only_without_triton = pytest.mark.skipif(
    bool(importlib.util.find_spec("triton")) or not TRITON.exists(),
    reason="Triton is installed: see test_gpu.py"
    if importlib.util.find_spec("triton")
    else f"no Triton in {TRITON}: python tests/get_packages.py",
)


def run(files, *words):
    """What pytest says of these files, with Triton."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words, *map(str, files)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(TRITON)},
        capture_output=True,
        text=True,
    )


def assert_interpreted(monkeypatch, files, cases):
    """Some cases pass in the interpreter, and none is skipped."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = run(files, "-k", cases)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout and "skipped" not in done.stdout


def assert_all_pass(files):
    """All cases pass, heavy ones and those that are compiled ahead of time, too."""
    done = run(files, "-m", "")
    assert done.returncode == 0, done.stdout + done.stderr
