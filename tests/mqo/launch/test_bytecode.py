import ast
import os
import subprocess
import sys
import warnings

import pytest
from mqo.launch.bytecode import share
from mqo.overlay.records import UPSTREAM
from mqo.overlay.tree import Tree

TAG = sys.implementation.cache_tag


@pytest.fixture
def tree(tmp_path):
    """A tree of two modules, and a copy of it in which one is another."""
    for name in ("tree", "copy"):
        folder = tmp_path / name / "megatron"
        folder.mkdir(parents=True)
        (folder / "same.py").write_text("WHERE = (lambda: 0).__code__.co_filename\n")
        (folder / "other.py").write_text(f"NAME = '{name}'\n")
    return tmp_path


def vendored(place):
    """The tree, with the record that `mqo vendor` leaves."""
    tree = Tree(place / "tree")
    tree.store.mkdir(exist_ok=True)
    (tree.store / UPSTREAM).touch()
    return tree


def compiled(root, name):
    return root / f"megatron/__pycache__/{name}.{TAG}.pyc"


PROGRAM = """
from importlib._bootstrap_external import SourceLoader
compiled, compile = [], SourceLoader.source_to_code
def noted(self, data, path, **rest):
    compiled.append(path.rpartition("/")[2])
    return compile(self, data, path, **rest)
SourceLoader.source_to_code = noted
from megatron import other, same
print([same.WHERE, other.NAME, compiled])
"""


def imported(root):
    """Where a fresh process finds one module, what it reads in the other, what it compiles."""
    env = os.environ | {"PYTHONPATH": str(root)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)


def test_a_copy_is_not_compiled_again_but_for_what_is_other_in_it(tree):
    share(vendored(tree), tree / "copy")
    linked = compiled(tree / "tree", "other").read_bytes()
    assert compiled(tree / "copy", "other").read_bytes() == linked
    where = str(tree / "copy/megatron/same.py")
    assert imported(tree / "copy") == [where, "copy", ["other.py"]]
    # What Python wrote in the place of the link did not reach the tree.
    assert compiled(tree / "copy", "other").read_bytes() != linked
    assert compiled(tree / "tree", "other").read_bytes() == linked
    assert imported(tree / "copy")[2] == []


def test_a_tree_is_compiled_once_and_a_changed_file_again(tree):
    share(vendored(tree), tree / "copy")
    first = {name: compiled(tree / "tree", name).stat().st_mtime_ns for name in ("same", "other")}
    (tree / "tree/megatron/other.py").write_text("NAME = 'new '\n")
    (tree / "next/megatron").mkdir(parents=True)
    share(vendored(tree), tree / "next")
    assert compiled(tree / "tree", "same").stat().st_mtime_ns == first["same"]
    assert compiled(tree / "tree", "other").stat().st_mtime_ns != first["other"]
    assert compiled(tree / "next", "other").samefile(compiled(tree / "tree", "other"))


def test_what_this_python_cannot_read_is_left_alone(tree):
    (tree / "tree/megatron/broken.py").write_text("what is this?\n")
    share(vendored(tree), tree / "copy")
    assert not compiled(tree / "tree", "broken").exists()
    assert compiled(tree / "copy", "same").exists()


def test_a_copy_on_another_disk_gets_copies(tree, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("cross-device")))
    share(vendored(tree), tree / "copy")
    assert (
        compiled(tree / "copy", "same").read_bytes() == compiled(tree / "tree", "same").read_bytes()
    )


def test_a_tree_from_elsewhere_stays_as_it_is(tree):
    share(Tree(tree / "tree"), tree / "copy")
    assert not list(tree.rglob("__pycache__"))


def test_upstreams_odd_syntax_is_no_news_for_the_user(tree):
    """Python 3.12 warns of an invalid escape sequence as every Python here does of this."""
    (tree / "tree/megatron/same.py").write_text("ALIKE = 1 is 1\n")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compile("1 is 1", "a file", "exec")
        share(vendored(tree), tree / "copy")
    assert [str(one.filename) for one in said] == ["a file"]
