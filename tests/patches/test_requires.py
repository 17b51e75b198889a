"""Every entry applied alone, with what it requires: nothing that it uses is missing."""

import ast
import functools
import warnings

import pytest
from mqo.overlay.plan import plan
from mqo.overlay.runtime import FOLDER
from mqo.overlay.series import Series
from mqo.overlay.verify.source import unbound_names
from mqo.project import Project

pytestmark = pytest.mark.slow

SERIES = Series.load(Project.here().patches)


def places(entries):
    """The packages of the runtime that these entries place: {"mqo.quant", ...}."""
    files = [name for entry in entries for name in entry.files if name.startswith(FOLDER)]
    names = {name.removeprefix(f"{FOLDER}/") for name in files}
    return {name.replace("/", ".") for name in names if not name.endswith(".py")}


OURS = places(SERIES.entries)


def used(source):
    """The packages of ours that a source imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {ours for ours in OURS if any(f"{name}.".startswith(f"{ours}.") for name in found)}


@pytest.fixture(scope="module")
def upstream(vendored):
    """Upstream's version and paths, and a function that gives a file's bytes."""
    known = vendored.upstream()
    return known.version, known.files, functools.cache(vendored.pristine)


def test_the_check_sees_what_upstream_does_not_have():
    assert used("import os\nfrom mqo.megatron import device\n") == {"mqo.megatron"}
    assert used("import mqo.quant.formats, megatron.core\n") == {"mqo.quant"}
    assert used("from mqo.quantities import x\n") == set()
    assert len(OURS) == 2


@pytest.mark.parametrize("name", [entry.name for entry in SERIES.entries])
def test_an_entry_with_what_it_requires_is_enough(upstream, name):
    version, paths, read = upstream
    alone = SERIES.only(SERIES.with_required([name]))
    files = plan(alone, version, paths, read)
    placed = places(alone.entries)
    assert files or SERIES[name].kind == "add" or not SERIES[name].applies_to(version)
    for path, file in files.items():
        with warnings.catch_warnings(action="ignore"):
            compile(file.content, path, "exec", dont_inherit=True)
            assert used(file.content) <= placed, path
            new = unbound_names(file.content, path)
            new = new and new - unbound_names(file.pristine, path)
        assert not new, path
