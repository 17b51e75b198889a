"""A tree that version 0.1 patched, by its own code from this repository's history, in this version.

Runs of 0.1 were opened by hand: docs/reliability.md.
"""

import os
import subprocess
import sys
import tarfile

import pytest
from mqo.project import Project

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
    return folder / "clone"


def mqo(*words, of=PROJECT.root, code=0):
    """What `mqo` of a clone prints, and that it ends with the exit code."""
    environment = os.environ | {"PYTHONPATH": str(of / "tools")}
    command = [sys.executable, "-m", "mqo", *map(str, words)]
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
