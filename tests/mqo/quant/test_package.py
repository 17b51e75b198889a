"""What the package may depend on, and what it exports."""

import ast
import sys
from pathlib import Path

from mqo import quant

FOLDER = Path(quant.__file__).parent
MODULES = sorted(FOLDER.rglob("*.py"))
# What the fast implementations compile with, numpy, which numba requires, and what others need.
OTHERS = {
    "frozen_model.py": {"pydantic"},
    "recipe.py": {"pydantic"},
    "recipe_files.py": {"pydantic"},
    "recipe_operands.py": {"pydantic"},
    "recipe_rules.py": {"pydantic"},
    "attention.py": {"transformers"},
    "comparison.py": {"matplotlib"},
    "cpu": {"numba", "llvmlite", "numpy"},
    "gpu": {"triton"},
}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, path
            yield "" if node.module.startswith("mqo.quant") else node.module.split(".")[0]


def test_it_imports_torch_and_the_standard_library_only():
    assert len(MODULES) >= 8
    for path in MODULES:
        own = OTHERS.get(path.relative_to(FOLDER).parts[0], set())
        assert set(imported(path)) - {"torch", ""} - own <= sys.stdlib_module_names, path


def test_every_exported_name_exists():
    assert [name for name in quant.__all__ if not hasattr(quant, name)] == []
