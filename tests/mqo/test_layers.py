"""All imports of mqo, lazy ones and those of types, too, against docs/architecture.md's layers."""

import ast
import graphlib
import re

import pytest
from mqo.project import Project

ROOT = Project.here().root
TEXT = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
TABLE = TEXT.partition("\n## The layers of `mqo`\n")[2].partition("\n## ")[0]
ROWS = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in TABLE.splitlines() if "|" in line]
LEVELS = {part: level for level, parts in enumerate(ROWS) for part in parts}


def imports(folder):
    """{module: the modules below `folder`, a package, that it imports}."""
    files = {}
    for file in folder.rglob("*.py"):
        parts = file.relative_to(folder.parent).with_suffix("").parts
        files[".".join(parts).removesuffix(".__init__")] = file
    return {name: set(imported(file, files)) for name, file in files.items()}


def imported(file, modules):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names if alias.name in modules)
            case ast.ImportFrom(source, names):
                assert node.level == 0, f"{file}:{node.lineno} is relative, and not understood here"
                if source in modules:
                    whole = (f"{source}.{alias.name}" for alias in names)
                    yield from (name if name in modules else source for name in whole)


def wrong(graph, levels):
    """The imports that do not go to a lower layer, those within a part of a layer apart."""
    for module, others in graph.items():
        for other in others:
            here, there = (name.split(".")[1] for name in (module, other))
            if here != there and levels[there] >= levels[here]:
                yield f"{module} imports {other}"


@pytest.fixture(scope="module")
def graph():
    return imports(ROOT / "tools/mqo")


def test_every_module_has_a_layer(graph):
    parts = {module.split(".")[1] for module in graph if "." in module}
    assert sorted(part for row in ROWS for part in row) == sorted(parts)


def test_imports_go_to_lower_layers(graph):
    assert sum(map(len, graph.values())) > 300
    assert sorted(wrong(graph, LEVELS)) == []


def test_no_modules_import_each_other(graph):
    graphlib.TopologicalSorter(graph).prepare()


def test_a_lazy_import_upwards_and_a_circle_are_found(tmp_path):
    for name, text in {
        "low/a.py": "def f():\n    from mine.high import b\n",
        "low/c.py": "import mine.low.a\n",
        "beside.py": "from mine.low.c import x\n",
        "high/__init__.py": "from mine.high import b\n",
        "high/b.py": "import json\nif x:\n    from mine.low.a import f\n",
    }.items():
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(text)
    found = imports(tmp_path / "mine")
    assert sorted(wrong(found, {"low": 0, "beside": 0, "high": 1})) == [
        "mine.beside imports mine.low.c",
        "mine.low.a imports mine.high.b",
    ]
    with pytest.raises(graphlib.CycleError) as error:
        graphlib.TopologicalSorter(found).prepare()
    assert {"mine.low.a", "mine.high.b"} == set(error.value.args[1])
