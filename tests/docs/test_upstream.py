"""The programs of docs/upstream.md: each shows its bug in upstream's tree, and none in ours."""

import os
import sys
from pathlib import Path

import pytest

from .. import forking

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
PROGRAMS = sorted(DOCS.glob("upstream/*.py"))
# Our patch is in what calls the function that this one shows.
NOT_OURS = {"diverged_without_save.py"}
# Upstream takes more to be there: a name of Python 3.12, and Triton, which torch must not see.
STAND_INS = """
import builtins
import runpy
import sys
import typing
from unittest.mock import MagicMock

if not hasattr(typing, "override"):
    typing.override = lambda function: function
found = builtins.__import__
stand_in = MagicMock()
stand_in.__version__ = "3.4.0"


def find(name, globals=None, *given, **named):
    of_upstream = (globals or {}).get("__name__", "").startswith("megatron.")
    if of_upstream and name.split(".")[0] == "triton" and "triton" not in sys.modules:
        return stand_in
    return found(name, globals, *given, **named)


builtins.__import__ = find
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.fixture(scope="module")
def pristine(vendored, tmp_path_factory):
    """A folder with upstream's files alone."""
    root = tmp_path_factory.mktemp("upstream")
    for path in vendored.upstream().files:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(vendored.pristine(path))
    return root


def run(*program, tree):
    """The exit code of a program on a tree, and what it printed; it ends by itself."""
    done = forking.run([sys.executable, *program], env=os.environ | {"PYTHONPATH": str(tree)})
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_upstream_has_the_bug(pristine, program):
    code, printed = run("-c", STAND_INS, program, tree=pristine)
    assert code == 1, printed


@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p.name not in NOT_OURS], ids=lambda path: path.stem
)
def test_a_patched_tree_has_it_no_more(vendored, program):
    code, printed = run(program, tree=vendored.root)
    assert code == 0, printed


def test_the_page_has_each_program():
    page = (DOCS / "upstream.md").read_text(encoding="utf-8")
    assert [p.name for p in PROGRAMS if f"(upstream/{p.name})" not in page] == []
