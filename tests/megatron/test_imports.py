"""The programs and packages of the tree stand alone: mqo starts them, and none imports it."""

import ast

import pytest
from mqo.project import Project

TREE = Project.here().tree
UPSTREAM = ("megatron/core", "megatron/training")


def ours():
    for file in TREE.rglob("*.py"):
        if not file.relative_to(TREE).as_posix().startswith(UPSTREAM):
            yield file


def imported(text):
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Import(names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(source, level=0):
                yield source.partition(".")[0]


def test_nothing_of_the_tree_imports_mqo():
    files = list(ours())
    assert {"pretrain_gpt.py", "text_generation_ptq.py"} <= {file.name for file in files}
    found = [str(file.relative_to(TREE)) for file in files if "mqo" in imported(file.read_text())]
    assert found == []


@pytest.mark.parametrize("text", ["import mqo.runs", "def f():\n    from mqo.data import encode"])
def test_an_import_is_found_wherever_it_stands(text):
    assert "mqo" in imported(text)
