"""Starts the tests of a Triton kernel in the interpreter, and finds what compiles it ahead."""

import os
import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run_in_the_interpreter(file, which):
    """How many of the tests of `file` with the mark pass under TRITON_INTERPRET=1, in a process.

    It has to be chosen before triton is imported.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", which, file],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(re.search(r"(\d+) passed", done.stdout)[1])


def _program(name):
    """A program of benchmarks/, which is no package."""
    found = spec_from_file_location(name, ROOT / f"benchmarks/{name}.py")
    module = sys.modules[name] = module_from_spec(found)
    found.loader.exec_module(module)
    return module


ahead = _program("ahead")
