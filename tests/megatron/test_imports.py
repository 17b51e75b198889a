"""The programs of the tree import of mqo its runtime alone, which a run has a copy of."""

import ast

import pytest
from mqo.overlay.runtime import PACKAGE
from mqo.project import Project

TREE = Project.here().tree
UPSTREAM = ("megatron/core", "megatron/training")


def ours():
    for file in TREE.rglob("*.py"):
        if not file.relative_to(TREE).as_posix().startswith(UPSTREAM):
            yield file


def imported(text):
    """The modules that a source imports, as it writes them."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom("mqo", names, level=0):
                yield from (f"mqo.{alias.name}" for alias in names)
            case ast.ImportFrom(source, level=0):
                yield source


def others_of_mqo(text):
    """The modules of mqo that a source imports, less those of the runtime."""
    found = (name for name in imported(text) if f"{name}.".startswith("mqo."))
    return [name for name in found if not f"{name}.".startswith(("mqo.quant.", "mqo.megatron."))]


def test_the_programs_import_of_mqo_its_runtime_alone():
    files = list(ours())
    assert {"pretrain_gpt.py", "text_generation_ptq.py"} <= {file.name for file in files}
    assert {file: found for file in files if (found := others_of_mqo(file.read_text()))} == {}


def test_the_runtime_imports_itself_alone():
    files = [f for part in ("quant", "megatron") for f in (PACKAGE / "mqo" / part).rglob("*.py")]
    assert len(files) > 100
    assert {file: found for file in files if (found := others_of_mqo(file.read_text()))} == {}


def test_the_quantizers_import_nothing_of_megatron():
    files = list((PACKAGE / "mqo/quant").rglob("*.py"))
    names = {file: set(imported(file.read_text())) for file in files}
    roots = ("megatron.", "mqo.megatron.")
    assert len(files) > 30
    assert [f for f, found in names.items() if any(f"{n}.".startswith(roots) for n in found)] == []


@pytest.mark.parametrize("text", ["import mqo.runs", "def f():\n    from mqo.data import encode"])
def test_an_import_is_found_wherever_it_stands(text):
    assert others_of_mqo(text)
