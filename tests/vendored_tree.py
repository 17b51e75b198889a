"""This checkout with its Megatron tree: without it, modules that import this are skipped."""

import os
import shutil
import subprocess
import sys

import pytest
from mqo.project import Project

from . import forking

PROJECT = Project.here()
if not (PROJECT.tree / "megatron/core").exists():
    pytest.skip("the tree is not vendored: run `mqo setup`", allow_module_level=True)


def run_ranks(program, *words):
    """Run a program of several ranks, which gets the folder of the demos first; what it prints."""
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    demos = PROJECT.tree / "examples/parallelism"
    done = forking.run([sys.executable, program, demos, *words], env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def git(root, *words):
    """What git printed of a command in a folder, as a person of the tests."""
    person = ("-c", "user.name=a tester", "-c", "user.email=tester@example.org")
    command = ["git", "-C", str(root), *person, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def commit_all(root):
    """Make a folder a git work tree, whose one commit has all of its files."""
    git(root, "init", "-q")
    git(root, "add", "--all", "--force")
    git(root, "commit", "-qm", "all")


def copy_checkout(tree, root):
    """Copy what the commands of a checkout need; `tree` is its Megatron tree."""
    ignored = shutil.ignore_patterns("__pycache__")
    # Other tests export the tree meanwhile, and note that in it.
    with tree.reading("copy, for a test"):
        for folder in ("Megatron-LM", "tools", "patches", "script"):
            shutil.copytree(PROJECT.root / folder, root / folder, ignore=ignored)
