"""A tree and a patch series in miniature: one entry of each kind, in source of our own."""

import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from mqo import cli
from mqo.data import preprocess
from mqo.overlay import literals, records, transaction
from mqo.overlay.records import Upstream
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree, sha256
from mqo.project import Project

LAYERS = '''"""A linear layer."""
import torch


class Linear:
    def forward(self, x, weight):
        # The product.
        y = torch.matmul( x,weight )   # trailing words
        return y

    def backward(self, grad, weight):
        return grad.matmul(weight)
'''
GADGET = '"""Uses the old engine."""\nimport old_engine\n\nstart = old_engine.start(1, "é")\r\n'
FILES = {
    "megatron/core/package_info.py": b"MAJOR = 1\nMINOR = 2\nPATCH = 3\n",
    "megatron/core/layers.py": LAYERS.encode(),
    "megatron/core/gadget.py": GADGET.encode(),
    "megatron/core/plain.py": b"answer = 42",
    "megatron/core/table.bin": bytes(range(256)),
    "megatron/training/loop.py": b"def run():\n\told_engine.start(2)\n",
}

SERIES = """
schema = 1
supported = ">=1,<2"

[[entry]]
name = "ours"
kind = "add"
upstream = ">=1"
reason = "What the others call."
files = ["megatron/ours.py"]

[[entry]]
name = "quant_sites"
kind = "site"
upstream = ">=1,<2"
requires = ["ours"]
reason = "Gives the GEMMs a type."

[[entry]]
name = "new_engine"
kind = "codemod"
upstream = ">=1,<2"
reason = "The old engine is gone."
"""

SITES = """
from mqo.overlay.edits import AddImport, Anchor, FileEdits, InsertBefore, WrapOperands


def gemm(site, scope, pattern, lhs):
    code = f"custom_quant_type = 'none'\\n{site} = operands('{site}', custom_quant_type)\\n"
    anchors = (Anchor(pattern),)
    wrap = {lhs: f"{site}.lhs", "weight": f"{site}.rhs"}
    return InsertBefore(scope, anchors, code), WrapOperands(scope, anchors, wrap)


FILES = (
    FileEdits(
        "megatron/core/layers.py",
        (
            AddImport("from megatron.ours import operands"),
            *gemm("fprop", "Linear.forward", "torch.matmul(x, weight)", "x"),
            *gemm("dgrad", "Linear.backward", "grad.matmul(weight)", "grad"),
        ),
    ),
)
"""

CODEMOD = """
import ast
import re

from mqo.overlay.drift import Place
from mqo.overlay.codemod import Splice, Codemod


def uses(source):
    for node in source.walk():
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "old_engine":
            yield node


CODEMOD = Codemod(
    roots=("megatron/core/", "megatron/training/"),
    needle=re.compile(rb"old_engine"),
    splices=lambda source: (Splice.over(node.value, "new_engine") for node in uses(source)),
    leftovers=lambda source: (Place(node.lineno, "old_engine") for node in uses(source)),
)
"""


@dataclass
class Mini:
    """A vendored tree in miniature, and the folder of its patch series."""

    tree: Tree
    patches: Path

    @property
    def series(self):
        return Series.load(self.patches)

    def bytes(self):
        """{path: content} of what `vendor` put into the tree."""
        return {path: self.tree.read(path) for path in self.tree.upstream().files}

    def path(self, name):
        return self.tree.root / "megatron" / name

    def edit(self, name, old, new):
        """Change a file of the tree by hand."""
        content = self.path(name).read_bytes()
        assert old in content
        self.path(name).write_bytes(content.replace(old, new))

    def set_types(self, **types):
        """Set quant types of the sites in the source."""
        path = self.path("core/layers.py")
        path.write_bytes(literals.write(path.read_bytes(), types))

    def change_patch(self, name, old, new):
        """Change an entry of the series."""
        file = self.patches / name
        text = file.read_text(encoding="utf-8")
        assert old in text
        file.write_text(text.replace(old, new), encoding="utf-8")


def store(tree, content):
    """Put an object into the tree; its SHA-256."""
    transaction.write_synced(tree.store / "objects" / sha256(content), content)
    return sha256(content)


def materialize(root, files, version="1.2.3"):
    """A tree that holds `files`, as `vendor` leaves it."""
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    tree = Tree(root)
    hashes = {path: sha256(content) for path, content in files.items()}
    for content in files.values():
        store(tree, content)
    upstream = records.as_json(Upstream(version, "wheel of our own", "3.11", hashes))
    transaction.write_synced(tree.store / records.UPSTREAM, upstream)
    return tree


def make_mini(folder, files=FILES):
    """A vendored tree in miniature and its patch series, in a folder that is there."""
    tree = materialize(folder / "tree", files)
    (folder / "tree/megatron/ours.py").write_text("def operands(*args): ...\n")
    patches = folder / "patches"
    patches.mkdir()
    texts = {"series.toml": SERIES, "quant_sites.py": SITES, "new_engine.py": CODEMOD}
    for name, text in texts.items():
        (patches / name).write_text(text, encoding="utf-8")
    return Mini(tree, patches)


LOCK = ("lock", "lock.holder", ".gitignore")


def contents(folder):
    """{path: (bytes, mode)} of all below a folder but what the lock consists of; None for links,
    the mode alone for folders.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            found[name] = (None, str(path.readlink()))
        elif path.parent.name != ".mqo" or path.name not in LOCK:
            content = path.read_bytes() if path.is_file() else None
            found[name] = (content, path.stat().st_mode)
    return found


def refused(outcome, *parts):
    """The error is one paragraph on stderr, and the code is the one for errors."""
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert err.startswith("mqo: ")
    assert len(err.splitlines()) == 1 or err.splitlines()[1].startswith("diff --git")
    assert "Traceback" not in err
    for part in parts:
        assert part in err


@pytest.fixture
def mini(tmp_path):
    return make_mini(tmp_path)


@pytest.fixture
def patched(mini):
    from mqo.overlay.apply import apply

    apply(mini.tree, mini.series)
    return mini


@pytest.fixture(autouse=True, scope="session")
def commands_built_once():
    """Have typer make the command line once, not at each call, which takes most of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture
def command_line(monkeypatch, capsys):
    """A function that runs `mqo` with some words: its exit code, its output and its errors."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["mqo", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capsys.readouterr()
        return left.value.code or 0, out, err

    return run


class MiniProject(Project):
    """The project of a tree in miniature, in which the files of "add" entries lie already."""

    ours = tree = property(lambda self: self.root / "tree")
    upstream_pin = property(lambda self: self.root / "Megatron-LM/UPSTREAM.toml")


@pytest.fixture
def mqo(mini, monkeypatch, command_line):
    """A function that runs `mqo` on the small tree: its exit code, its output and its errors."""
    project = MiniProject(mini.patches.parent)
    monkeypatch.setattr(Project, "here", classmethod(lambda cls: project))

    def run(*words, tree=mini.tree.root):
        return command_line(*words, "--tree", tree)

    return run


@pytest.fixture
def index_here(monkeypatch, tmp_path_factory):
    """Index corpora in this process: one of its own takes seconds to import Megatron."""
    pytest.importorskip("megatron.core.datasets.indexed_dataset")

    def ask(program, words, **options):
        counts = tmp_path_factory.mktemp("counts") / "counts.json"
        preprocess.run(preprocess.parse_args([*words, str(counts)]))
        return json.loads(counts.read_text())

    monkeypatch.setattr(preprocess, "ask", ask)
