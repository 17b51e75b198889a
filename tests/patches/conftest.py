"""The repository's patches, run on small sources of our own."""

import importlib
import sys
import textwrap
import types

import pytest
from mqo.overlay.codemod import apply_codemod
from mqo.overlay.edits import covers
from mqo.overlay.plan import plan
from mqo.overlay.rewrite import rewrite
from mqo.overlay.series import Series
from mqo.project import Project

SERIES = Series.load(Project.here().patches)
PIN = "0.19.2"
ATTENTION = "megatron/core/transformer/dot_product_attention.py"


def codemod(name, source, path="megatron/core/x.py"):
    """`source` after the codemod `name`."""
    content = source if isinstance(source, bytes) else textwrap.dedent(source).encode()
    return apply_codemod(path, content, SERIES[name].load_codemod(), name).decode()


def sites(name, path, source, version=PIN):
    """`source` after the edits that the site entry `name` makes to the file at `path`."""
    meant = [e for e in SERIES[name].load_edits() if e.path == path and covers(e.versions, version)]
    assert meant
    content = textwrap.dedent(source).encode()
    for edits in meant:
        content = rewrite(content, edits, version, name)
    return content.decode()


def executed(name, path, source, version=PIN, **names):
    """The names of a module of that source, run beside `names`."""
    exec(sites(name, path, source, version), names)
    return names


def patched_attention(source, *names):
    """`source` after the edits that entries make to the file of the local attention, in order."""
    for name in names:
        source = sites(name, ATTENTION, source)
    return source


def planned(name, version, files):
    """What the entry `name` alone makes of {path: content}."""
    series = Series((SERIES[name],))
    return plan(series, version, files, files.__getitem__)


@pytest.fixture
def module(monkeypatch):
    """A function that puts a module of given names in the place of a real one."""

    def put(name, **names):
        stand_in = types.ModuleType(name)
        vars(stand_in).update(names)
        monkeypatch.setitem(sys.modules, name, stand_in)
        parent, _, child = name.rpartition(".")
        monkeypatch.setattr(importlib.import_module(parent), child, stand_in, raising=False)
        return stand_in

    return put
