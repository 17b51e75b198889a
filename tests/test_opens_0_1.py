"""What version 0.1 makes, by its own code from this repository's history, in this version.

More of it was opened by hand: docs/reliability.md.
"""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from mqo.project import Project
from mqo.runs import RunFolder

pytestmark = pytest.mark.slow
PROJECT = Project.here()
OLD = "0340fb9"  # the last commit before the next version's first change
if not (PROJECT.tree / "megatron/core").exists():
    pytest.skip("the tree is not vendored: run `mqo setup`", allow_module_level=True)


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """The files of 0.1, with the wheels that are here already."""
    folder = tmp_path_factory.mktemp("version 0.1")
    archive = folder / "old.tar"
    git = ["git", "-C", str(PROJECT.root), "archive", "-o", str(archive), OLD]
    if subprocess.run(git, capture_output=True).returncode:
        pytest.skip(f"the history down to {OLD} is not here: it is no clone, or a shallow one")
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "clone", filter="data")
    (folder / "clone/.cache").mkdir()
    (folder / "clone/.cache/wheels").symlink_to(PROJECT.cache / "wheels")
    mqo("vendor", of=folder / "clone")
    mqo("apply", of=folder / "clone")
    (folder / "clone/data").symlink_to(PROJECT.root / "data")
    return folder / "clone"


def mqo(*words, of=PROJECT.root, code=0):
    """What `mqo` of a clone prints, and that it ends with the exit code."""
    return python("-m", "mqo", *words, of=of, code=code)


def python(*words, of=PROJECT.root, code=0):
    """What a Python program of a clone prints, and that it ends with the exit code."""
    environment = os.environ | {"PYTHONPATH": str(of / "tools")}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=environment, cwd=of, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_a_patched_tree_is_brought_up_to_date_and_restored(old, tmp_path):
    tree = tmp_path / "a tree"
    mqo("vendor", "--tree", tree, of=old)
    before = {path: path.read_bytes() for path in tree.rglob("*.py")}
    mqo("apply", "--tree", tree, of=old)
    assert "outdated" in mqo("status", "--tree", tree, code=1)
    mqo("apply", "--tree", tree)
    said = mqo("status", "--tree", tree)
    assert "outdated" not in said and "not applied" not in said
    mqo("restore", "--tree", tree)
    assert {path: path.read_bytes() for path in tree.rglob("*.py")} == before


def test_a_run_that_stopped_half_way_goes_on_to_the_bit_and_is_read(old, tmp_path):
    cell = ["--model", "llama32-1b", "--dataset", "wikipedia", "--training-config", "tiny"]
    cell += ["--quantization", "mxfp4", "--gemms", "all", "--block", "16"]
    flags = ["--", "--save-interval", "4", "--seed", "5"]

    def train(place, *more, of=PROJECT.root, runs=()):
        words = [tmp_path / place, *cell, *runs, *flags, *more]
        said = python("script/train_config.py", *words, of=of)
        return Path(said.split("\nfolder   : ")[1].splitlines()[0])

    whole = train("whole", of=old)
    half = train("half", "--exit-interval", "4", of=old)
    resumed = train("half", runs=("--runs", tmp_path / "runs"))
    assert "mxfp4" in mqo("eval", half, "--text", text(tmp_path))
    mqo("plot", half, "-o", tmp_path / "losses.svg")
    assert losses(half) | losses(resumed) == losses(whole)


def text(folder):
    path = folder / "text.txt"
    path.write_text("A few words that are read again and again. " * 20)
    return path


def losses(run):
    """{(step, name): value} of each loss and gradient norm of a run."""
    series = RunFolder(run).read_metrics()
    names = [name for name in series if "loss" in name or "norm" in name]
    return {(step, name): value for name in names for step, value in series[name]}
