"""This checkout with its Megatron tree: without it, modules that import this are skipped."""

import shutil

import pytest
from mqo.project import Project

PROJECT = Project.here()
if not (PROJECT.tree / "megatron/core").exists():
    pytest.skip("the tree is not vendored: run `mqo setup`", allow_module_level=True)


def copy_checkout(tree, root):
    """Copy what the commands of a checkout need; `tree` is its Megatron tree."""
    ignored = shutil.ignore_patterns("__pycache__")
    # Other tests export the tree meanwhile, and note that in it.
    with tree.reading("copy, for a test"):
        for folder in ("Megatron-LM", "tools", "patches", "script"):
            shutil.copytree(PROJECT.root / folder, root / folder, ignore=ignored)
