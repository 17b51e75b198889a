"""Files that users edit, series.toml, UPSTREAM.toml and patches: nonsense in them is one paragraph
and exit code 2, and nothing is changed.
"""

import contextlib
import io
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mqo import cli
from mqo.overlay import pin as pins
from mqo.overlay.pin import Pin
from mqo.overlay.series import Series
from mqo.overlay.tree import sha256
from mqo.project import Project

from ..conftest import CODEMOD, FILES, SERIES, SITES, MiniProject, contents, make_mini, refused
from .conftest import PIN, WHEEL, wheel

COMMANDS = (["status"], ["apply"], ["apply", "new_engine"], ["restore"], ["diff"])


@pytest.fixture
def unchanged(mini, mqo):
    """A function that edits a file of the project, after which every command refuses it."""

    def check(file, content, *parts, commands=COMMANDS):
        path = mini.patches.parent / file
        path.parent.mkdir(exist_ok=True)
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        before = contents(mini.tree.root)
        for words in commands:
            refused(mqo(*words), path.name, *parts)
            assert contents(mini.tree.root) == before

    return check


# -- series.toml -------------------------------------------------------------------------------

DEEP = "a = " + "[" * 100_000
MORE = """
[[entry]]
name = "more"
kind = "add"
upstream = ""
reason = "R."
files = ["megatron/more"]
"""
TABLES = {
    "empty": ("", "no schema"),
    "gone": (None, "cannot be read"),
    "no TOML": ("schema = [", "not TOML"),
    "no UTF-8": (b"schema = 1 # \xff", "not TOML"),
    "deep": (DEEP, "not TOML"),
    "schema": (SERIES.replace("schema = 1", "schema = 9"), "schema 9", "schema 1"),
    "schema of a kind": (SERIES.replace("schema = 1", "schema = true"), "schema True"),
    "no entries": ("schema = 1\n", "no key 'entry'"),
    "entry": ("schema = 1\nentry = 3\n", "entry = 3", "a list"),
    "entries": ("schema = 1\nentry = [3]\n", "a table"),
    "kind": (SERIES.replace('"codemod"', '"magic"'), "'new_engine'", "'magic'", "'codemod'"),
    "key": (SERIES.replace("reason =", "reasons =", 1), "unknown key 'reasons'", "requires"),
    "top key": ("suported = ''\n" + SERIES, "unknown key 'suported'", "supported"),
    "no key": (SERIES.replace('kind = "codemod"\n', ""), "no key 'kind'"),
    "type": (SERIES.replace('["megatron/ours.py"]', '"megatron/ours.py"'), "files =", "a list"),
    "row type": (SERIES.replace('["megatron/ours.py"]', "[3]"), "files, number 1 = 3", "a string"),
    "name type": (SERIES.replace('"ours"\nkind', "1\nkind"), "name = 1", "a string"),
    "name": (SERIES.replace('"new_engine"', '"../new_engine"'), "name = ", "such as 'quant_sites'"),
    "twice": (SERIES.replace('"new_engine"', '"quant_sites"'), "two entries"),
    "reason": (SERIES.replace('"The old engine is gone."', '" "'), "empty reason"),
    "range": (SERIES.replace('">=1,<2"\nreason', '"one"\nreason'), "upstream = 'one'", "a range"),
    "supported": (SERIES.replace('supported = ">=1,<2"', 'supported = "1"'), "supported = '1'"),
    "requires": (SERIES.replace('["ours"]', '["our"]'), "requires 'our'", "ours"),
    "itself": (SERIES.replace('["ours"]', '["quant_sites"]'), "requires 'quant_sites'"),
    "cycle": (
        SERIES.replace('"add"\n', '"add"\nrequires = ["quant_sites"]\n'),
        "'ours': requires 'quant_sites'",
        "above it: none",
    ),
    "no patch": (SERIES.replace('"new_engine"', '"newer_engine"'), "newer_engine.py"),
    "misspelt": (SERIES.replace("megatron/ours.py", "megatron/our.py"), "'megatron/our.py'"),
    "outside": (SERIES.replace("megatron/ours.py", "megatron/../../victim"), "files has"),
    "absolute": (SERIES.replace("megatron/ours.py", "/etc"), "files has '/etc'"),
    "hidden": (SERIES.replace("megatron/ours.py", ".mqo/objects"), "files has '.mqo/objects'"),
    "git's": (SERIES.replace("megatron/ours.py", ".git/hooks"), "files has '.git/hooks'"),
    "whole tree": (SERIES.replace("megatron/ours.py", "."), "files has '.'"),
    "upstream's": (SERIES.replace("megatron/ours.py", "megatron/core"), "files has"),
    "no files": (SERIES.replace('["megatron/ours.py"]', "[]"), "'ours': files = []"),
    "files of a site": (SERIES.replace('"site"', '"site"\nfiles = ["megatron/x"]'), "kind 'add'"),
    "dead link": (SERIES.replace("megatron/ours.py", "megatron/" + "x" * 300), "does not exist"),
}


@pytest.mark.parametrize("what", TABLES)
def test_a_series_that_is_nonsense(unchanged, what):
    content, *parts = TABLES[what]
    unchanged("patches/series.toml", content, *parts)


def test_a_tree_that_version_0_1_patched_is_refused(mini, mqo):
    """Its record says "sweep" for "codemod"."""
    assert mqo("apply")[0] == 0
    record = mini.tree.store / "manifest.json"
    record.write_text(record.read_text().replace('"codemod"', '"sweep"'))
    before = record.read_bytes()
    for command in ("status", "apply", "restore"):
        code, _, err = mqo(command)
        assert code != 0 and "Version 0.1" in err and "0340fb9" in err
    assert record.read_bytes() == before


def test_a_series_may_be_extended(mini, mqo):
    (mini.tree.root / "megatron/more").mkdir()
    (mini.patches / "series.toml").write_text(SERIES + MORE)
    assert mqo("status")[0] == 1
    assert mqo("apply")[0] == 0


# -- patches -----------------------------------------------------------------------------------

PATCHES = {
    "raises": ("1 / 0\n", "ZeroDivisionError: division by zero"),
    "leaves": ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
    "no Python": ("def f(:\n", "SyntaxError"),
    "null": ("x = 1\0\n", "new_engine.py fails"),
    "no UTF-8": (b"x = '\xff'\n", "SyntaxError"),
    "deep": ("x = " + "(" * 10_000, "new_engine.py fails"),
    "import": ("import nothing_of_that_name\n", "ModuleNotFoundError"),
    "empty": ("", "has no CODEMOD", "CODEMOD, a Codemod"),
    "type": ("CODEMOD = 3\n", "has no CODEMOD"),
    "rule raises": (
        CODEMOD.replace("for node in uses", "for 1 / 0 in uses"),
        "new_engine.py fails",
    ),
    "rule fails": (CODEMOD.replace('"new_engine")', "None)"), "AttributeError"),
    "rule leaves": (
        CODEMOD.replace("def uses(source):", "def uses(source):\n    exit(0)"),
        "SystemExit",
    ),
    "several lines": ("raise ValueError('one\\n\\ntwo')\n", "ValueError: one two"),
}


@pytest.mark.parametrize("what", PATCHES)
def test_a_codemod_that_is_nonsense(unchanged, what):
    content, *parts = PATCHES[what]
    unchanged("patches/new_engine.py", content, *parts, commands=[["apply"]])


STOPPED = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"


@pytest.mark.parametrize(
    "content",
    [STOPPED, CODEMOD.replace("def uses(source):", f"def uses(source):\n    exec({STOPPED!r})")],
    ids=["patch", "rule"],
)
def test_a_signal_while_a_patch_runs_is_no_error_of_the_patch(mini, tmp_path, content):
    (mini.patches / "new_engine.py").write_text(content)
    before = contents(tmp_path)
    assert said(tmp_path, "apply") == (128 + signal.SIGTERM, "")
    assert contents(tmp_path) == before


EDITS = {
    "type": ("FILES = 3\n", "has no FILES", "a tuple of FileEdits"),
    "types": ("FILES = ('x',)\n", "has no FILES"),
    "range": (
        SITES.replace("Anchor(pattern)", "Anchor(pattern, versions='one')"),
        "InvalidSpecifier",
    ),
    "pattern": (SITES.replace('"grad.matmul(weight)"', '"grad.matmul("'), "quant_sites.py"),
    "edit": (SITES.replace("AddImport(", "str("), "among its edits"),
    "outside": (SITES.replace("megatron/core/layers.py", "../victim.py"), "edits ../victim.py"),
}


@pytest.mark.parametrize("what", EDITS)
def test_edits_that_are_nonsense(mini, mqo, what):
    content, *parts = EDITS[what]
    (mini.patches / "quant_sites.py").write_text(content)
    before = contents(mini.tree.root)
    refused(mqo("apply"), *parts)
    assert contents(mini.tree.root) == before


# -- UPSTREAM.toml -----------------------------------------------------------------------------

UPSTREAM = {
    "empty": ("", "no schema"),
    "gone": (None, "cannot be read"),
    "no TOML": ("version = ", "not TOML"),
    "deep": (DEEP, "not TOML"),
    "schema": (PIN.replace("schema = 1", "schema = 2"), "schema 2", "schema 1"),
    "key": (PIN.replace('pythons = ["3', 'python = ["3'), "unknown key 'python'"),
    "no key": (PIN.replace('version = "1.2.3"\n', ""), "no key 'version'"),
    "no helper": (PIN.replace("[helper]", "[helpers]"), "unknown key 'helpers'"),
    "helper": (PIN.replace('source_sha256 = ""\n', ""), "helper: no key 'source_sha256'"),
    "type": (PIN.replace('["3.11"]', '"3.11"'), "pythons = '3.11'", "a list"),
    "wheels": ("wheels = 3\n" + PIN.partition("[wheels]")[0], "wheels = 3"),
    "wheel": (PIN.replace(WHEEL, "x.whl"), "wheels = 'x.whl'"),
    "digest": (PIN.replace(sha256(wheel(FILES)), "ab"), "'ab'", "64 hexadecimal"),
    "digest type": (PIN.replace(f'"{sha256(wheel(FILES))}"', "1"), WHEEL, "a string"),
    "version": (PIN.replace('"1.2.3"', '"one"'), "version = 'one'"),
    "python": (PIN.replace('"3.11"', '"python3"'), "pythons = 'python3'"),
    "no python": (PIN.replace('["3.11"]', "[]"), "pythons is empty"),
    "package": (PIN.replace('"megatron/core", ', '"..", '), "packages = '..'", "megatron/core"),
    "root": (PIN.replace('"megatron/core", ', '"/", '), "packages = '/'"),
}


@pytest.mark.parametrize("what", UPSTREAM)
def test_a_pin_that_is_nonsense(mini, unchanged, what):
    content, *parts = UPSTREAM[what]
    file = "Megatron-LM/UPSTREAM.toml"
    source = mini.patches.parent / WHEEL
    source.write_bytes(wheel(FILES))
    (mini.patches.parent / "Megatron-LM").mkdir()
    (mini.patches.parent / file).write_text(PIN)
    vendor = ["vendor", "--force", "--from", str(source)]
    unchanged(file, content, *parts, commands=[["vendor"], vendor])


def test_the_repositorys_own_tables_are_right():
    project = Project.here()
    assert len(Series.of_project(project).entries) > 10
    assert Pin.load(project.upstream_pin).version


def test_a_pre_release_may_be_pinned(tmp_path):
    (tmp_path / "UPSTREAM.toml").write_text(PIN.replace("1.2.3", "0.20.0rc1"))
    assert Pin.load(tmp_path / "UPSTREAM.toml").releases == ["0.20.0rc1"]
    assert pins.SCHEMA == 1


# -- any table ---------------------------------------------------------------------------------

TEXTS = st.text(max_size=12).filter(lambda text: not any(0xD800 <= ord(c) < 0xE000 for c in text))
SCALARS = st.one_of(
    st.sampled_from(["1", "9", "-1", "0.5", "inf", "true", "1979-05-27", '""', '"x"', "[]", "{}"]),
    st.sampled_from(
        ['">=1"', '"ours"', '"site"', '"codemod"', '"add"', '"magic"', '"quant_sites"']
    ),
    st.sampled_from(['"../x"', '"/"', '"megatron"', '"megatron/ours.py"', '"3.12"', "''' '''"]),
    st.sampled_from(["[" * 2000, "9" * 5000, "{a" + ".a" * 2000 + " = 1}"]),
    TEXTS.map(lambda text: f'"{text}"'),
    TEXTS,
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda row: f"[{', '.join(row)}]")
        | inner.map(lambda value: f"{{ name = {value} }}")
    ),
    max_leaves=4,
)
KEYS = st.sampled_from(["schema", "name", "kind", "files", "requires", "entry", "more", "helper.x"])


@st.composite
def edited(draw, good):
    """A good table with a few edits, line by line or byte by byte."""
    lines = good.splitlines()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        key, equals, _ = lines[at].partition(" = ")
        match draw(
            st.sampled_from(["value", "value", "value", "drop", "twice", "key", "cut", "text"])
        ):
            case "value" if equals:
                lines[at] = f"{key} = {draw(VALUES)}"
            case "drop" if len(lines) > 1:
                del lines[at]
            case "twice":
                lines.insert(draw(st.integers(0, len(lines))), lines[at])
            case "key":
                lines.insert(at, f"{draw(KEYS)} = {draw(VALUES)}")
            case "cut":
                lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]
            case "text":
                lines[at] += draw(TEXTS)
    return "\n".join(lines)


def tables(good):
    return st.one_of(edited(good), edited(good), st.binary(max_size=40), TEXTS, VALUES)


def said(folder, *words):
    """Exit code and stderr of `mqo`, which raises nothing else."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["mqo", *map(str, words), "--tree", str(folder / "tree")])
        patch.setattr(Project, "here", classmethod(lambda cls: MiniProject(folder)))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as left:
                return left.code or 0, err.getvalue()
    return 0, err.getvalue()


def try_table(file, table, *commands):
    """No command ends otherwise than with its code, nor changes a tree when that is 2."""
    folder = Path(tempfile.mkdtemp(prefix="mqo-tables-"))
    try:
        make_mini(folder)
        (folder / "Megatron-LM").mkdir()
        (folder / "Megatron-LM/UPSTREAM.toml").write_text(PIN)
        (folder / WHEEL).write_bytes(wheel(FILES))
        (folder / file).write_bytes(table if isinstance(table, bytes) else table.encode())
        for words in commands:
            before = contents(folder)
            code, err = said(folder, *(word.format(folder=folder) for word in words))
            assert code in (0, 1, 2)
            assert code == 0 or words[0] != "apply" or err.startswith("mqo: ")
            if code == 2:
                assert (err[:5], err.count("\n")) == ("mqo: ", 1)
            if code != 0 or words[0] == "status":
                assert contents(folder) == before
    finally:
        shutil.rmtree(folder)


def fuzz(examples, good, file, *commands):
    health = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    some = settings(max_examples=examples, suppress_health_check=health, database=None)
    some(given(tables(good))(lambda table: try_table(file, table, *commands)))()


EXAMPLES = pytest.mark.parametrize("examples", [40, pytest.param(1000, marks=pytest.mark.heavy)])


@EXAMPLES
def test_no_series_is_a_traceback_or_half_applied(examples):
    commands = (["status"], ["apply"], ["restore"])
    fuzz(examples, SERIES.lstrip(), "patches/series.toml", *commands)


@EXAMPLES
def test_no_pin_is_a_traceback_or_half_vendored(examples):
    commands = (["status"], ["vendor", "--force", "--from", "{folder}/" + WHEEL])
    fuzz(examples, PIN, "Megatron-LM/UPSTREAM.toml", *commands)
