"""docs/architecture.md against the pinned tree: what it names is there, what is gone is not."""

import re
import subprocess
from pathlib import PurePath

import pytest

from .vendored_tree import PROJECT

TEXT = (PROJECT.root / "docs/architecture.md").read_text(encoding="utf-8")
BODY, OLD = TEXT.split("## Paths in older descriptions")
OPEN = re.search(r"## Which file of this project to open\n.*?(?=## )", BODY, re.DOTALL)[0]
BODY = BODY.replace(OPEN, "")
PATH = re.compile(
    r"`((?:megatron|tools|examples|pretrain_gpt|distill_gpt|preflight|UPSTREAM|README)[\w./]*)`"
)
ROWS = [line.split("|")[1:3] for line in OLD.splitlines() if line.startswith("| `")]
GONE = [PATH.findall(left)[0] for left, _ in ROWS]
NOW = [path for _, right in ROWS for path in PATH.findall(right)]


def names(path):
    """Whether the tree has exactly this path, upper and lower case told apart."""
    here = PROJECT.tree
    for part in path.split("/"):
        if part not in {entry.name for entry in here.iterdir()}:
            return False
        here /= part
    return True


@pytest.mark.parametrize("path", sorted({*PATH.findall(BODY), *NOW}))
def test_what_it_names_is_there(path):
    assert names(path)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w.-]+/[\w./-]+)`", OPEN))))
def test_each_file_of_ours_to_open_is_there(path):
    assert (PROJECT.root / path).exists()


@pytest.mark.parametrize("path", GONE)
def test_what_it_calls_gone_is_not_there(path):
    assert not names(path)


def test_all_that_is_ours_is_listed():
    section = BODY.split("## What is ours in the tree")[1]
    listed = [path for line in section.splitlines() for path in PATH.findall(line.split(" | ")[0])]
    done = subprocess.run(["git", "ls-files"], cwd=PROJECT.tree, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("this is no git work tree")
    files = [PurePath(name) for name in done.stdout.splitlines()]
    assert files
    assert [f for f in files if not any(f.is_relative_to(path) for path in listed)] == []


def test_there_is_something_to_check():
    assert len(PATH.findall(BODY)) > 50
    assert len(GONE) > 5


def test_the_functions_and_classes_that_it_names_are_in_their_files():
    training = (PROJECT.tree / "megatron/training/training.py").read_text(encoding="utf-8")
    for name in ("pretrain", "train", "train_step"):
        assert f"\ndef {name}(" in training
    linear = (PROJECT.tree / "megatron/core/tensor_parallel/layers.py").read_text(encoding="utf-8")
    assert "\nclass LinearWithGradAccumulationAndAsyncCommunication(" in linear
