"""This checkout with its Megatron tree: without it, modules that import this are skipped."""

import pytest
from mqo.project import Project

PROJECT = Project.here()
if not (PROJECT.tree / "megatron/core").exists():
    pytest.skip("the tree is not vendored: run `mqo setup`", allow_module_level=True)
