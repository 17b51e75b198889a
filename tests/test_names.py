"""Names that say nothing about what they hold are not bound."""

import ast
import subprocess
from collections import Counter

import pytest
from mqo.project import Project

ROOT = Project.here().root
VAGUE = {"asked", "found", "how", "made", "of", "one", "place", "said", "what"}
FOLDERS = ("Megatron-LM", "benchmarks", "docs", "patches", "script", "tools")
# Keys of files and of `--json`, which programs read, and the parts of an error.
KEPT = {
    ("tools/mqo/doctor.py", "found"),
    ("tools/mqo/doctor.py", "what"),
    ("tools/mqo/errors.py", "found"),
    ("tools/mqo/megatron/run/errors.py", "found"),
    ("tools/mqo/overlay/journal.py", "made"),
    ("tools/mqo/perf/verdicts.py", "what"),
    ("tools/mqo/program.py", "what"),
    ("tools/mqo/quant/quant_config.py", "asked"),
    ("tools/mqo/report/collect.py", "what"),
    ("tools/mqo/run_records.py", "asked"),
}


def bound_names(tree):
    """Yield (line, name) of each variable, parameter, function, class and alias."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.alias(asname=str(name))
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                yield node.lineno, name


def test_each_kind_of_binding_is_seen():
    source = """
import a as one
def of(place, *, how): pass
async def made(): pass
class found: pass
try: what, (asked, said) = 1, (2, 3)
except ValueError as one: pass
match one:
    case [found, *what]: of = [how for how in one]
"""
    twice = {"found", "how", "of", "one", "what"}
    assert Counter(name for _, name in bound_names(ast.parse(source))) == {
        name: 2 if name in twice else 1 for name in VAGUE
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_vague_name_is_bound(folder):
    command = ["git", "ls-files", f"{folder}/*.py"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    vague = {
        (file, name): line
        for file in files.splitlines()
        for line, name in bound_names(ast.parse((ROOT / file).read_bytes()))
        if name in VAGUE
    }
    assert files
    assert vague.keys() == {(file, name) for file, name in KEPT if file.startswith(f"{folder}/")}
