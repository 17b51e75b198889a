"""The documented command line, run as a program under a Python that has nothing installed."""

import os
import shutil
import subprocess
import sys

import pytest
from mqo.project import Project

LAYERS = "megatron/core/tensor_parallel/layers.py"
ATTENTION = "megatron/core/transformer/dot_product_attention.py"
SOURCE = """
class LinearWithGradAccumulationAndAsyncCommunication:
    def forward(ctx, total_input, weight):
        custom_quant_type = "hifp8"
        return typed_matmul(total_input, weight, custom_quant_type)

class ColumnParallelLinear:
    def forward(self, x):
        return LinearWithGradAccumulationAndAsyncCommunication.apply(x, self.weight)
"""
PLAIN = """
class DotProductAttention:
    def forward(self, query, key, value):
        return torch.bmm(torch.bmm(query, key), value)
"""
HEAVY = ("torch", "libcst", "typer", "pydantic", "packaging", "filelock")


@pytest.fixture
def root(tmp_path):
    for path in (LAYERS, ATTENTION):
        (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / LAYERS).write_text(SOURCE)
    (tmp_path / ATTENTION).write_text(PLAIN)
    return tmp_path


@pytest.fixture
def project(tmp_path):
    """A checkout whose .venv is a program that starts this very Python, with what it has."""
    here, there = Project.here().root, tmp_path / "project"
    parts = ("commands", "overlay", "quant", "megatron")
    for folder in (*(f"tools/mqo/{part}" for part in parts), "script"):
        shutil.copytree(here / folder, there / folder)
    modules = ("__init__", "errors", "output", "process", "project", "untrusted")
    for name in modules:
        shutil.copy(here / f"tools/mqo/{name}.py", there / f"tools/mqo/{name}.py")
    for file in ("tools/bootstrap.py", "constraints.txt", "pyproject.toml"):
        shutil.copy(here / file, there / file)
    python = there / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho ".venv runs" >&2\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    stamp = "import bootstrap; bootstrap.STAMP.write_text(bootstrap._fingerprint())"
    subprocess.run([sys.executable, "-c", stamp], cwd=there / "tools", check=True)
    return there


def run(*arguments, flags=("-S", "-E"), root=None, project=None):
    """Without -S this Python has its packages; with it the standard library alone."""
    script = (project or Project.here().root) / "script/quant_type_modifier.py"
    command = [sys.executable, *flags, str(script), *arguments, "--tree", str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_reader_that_leaves_early_is_no_error(root):
    script = Project.here().root / "script/quant_type_modifier.py"
    words = [sys.executable, "-S", "-E", str(script), "--check", "--tree", str(root)]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_check_needs_only_the_standard_library(root):
    done = run("--check", root=root)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"fprop  hifp8  {LAYERS}:4\n" in done.stdout
    assert not (root / ".mqo").exists()


def test_a_dry_run_continues_in_venv_if_this_python_lacks_libcst(root, project):
    done = run("--linear-quant", "mxfp8", "--dry-run", root=root, project=project)
    assert (done.returncode, done.stderr) == (0, ".venv runs\n")
    assert '+        custom_quant_type = "mxfp8"\n' in done.stdout
    assert not (root / ".mqo").exists()


def test_check_imports_nothing_heavy(root):
    program = (
        "import sys\n"
        "from mqo.commands.quant_type_modifier import main\n"
        f"code = main(['--check', '--tree', {str(root)!r}])\n"
        f"sys.exit(code or ', '.join(m for m in {HEAVY!r} if m in sys.modules) or 0)\n"
    )
    tools = Project.here().root / "tools"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tools, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_modification_continues_in_venv_if_this_python_lacks_the_lock(root, project):
    done = run("--linear-quant", "mxfp8", root=root, project=project)
    assert (done.returncode, done.stderr) == (0, ".venv runs\n")
    assert done.stdout.startswith(f"fprop  hifp8 -> mxfp8  {LAYERS}:4\n")
    assert (root / LAYERS).read_text() == SOURCE.replace("hifp8", "mxfp8")
    done = run("--restore", root=root, project=project)
    assert (done.returncode, (root / LAYERS).read_text()) == (0, SOURCE)


def test_a_python_with_the_lock_does_it_itself(root, project):
    done = run("--linear-quant", "mxfp8", flags=(), root=root, project=project)
    assert (done.returncode, done.stderr) == (0, "")
    assert "undo: python3 script/quant_type_modifier.py --restore --tree" in done.stdout


def test_an_error_ends_with_2(root):
    done = run("--qk-quant", "mxfp8", root=root)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        f"quant_type_modifier: {ATTENTION}:4 (DotProductAttention) has no"
    )
