"""Files with custom quantizers: what is registered, and the errors of their code."""

import importlib
import sys

import pytest
import torch
from mqo.quant.backend import fake_quantize
from mqo.quant.plugin_context import QuantizerError
from mqo.quant.plugin_file import load_quantizers, load_rows
from mqo.quant.plugin_rows import PluginRow
from mqo.quant.plugin_source import declared
from mqo.quant.plugins import PLUGINS

HEAD = "from mqo.quant import quantizer\n"
DOUBLED = '@quantizer("doubled")\ndef doubled(x, context):\n    return 2 * x\n'


def test_all_quantizers_of_a_file_are_types_then(write_file):
    path = write_file(HEAD + DOUBLED + DOUBLED.replace("doubled", "other"))
    assert load_quantizers(path) == ["doubled", "other"]
    assert fake_quantize(torch.ones(4), "doubled").eq(2).all()


def test_a_file_may_import_modules_of_its_folder(write_file):
    write_file("FACTOR = 3\n", "helper_of_mine.py")
    before = list(sys.path)
    path = write_file(
        HEAD + "import helper_of_mine\n" + DOUBLED.replace("2", "helper_of_mine.FACTOR")
    )
    load_quantizers(path)
    assert fake_quantize(torch.ones(4), "doubled").eq(3).all()
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x = (\n", r"mine\.py cannot be run, in line 1: SyntaxError"),
        ("x = 1\nimport nothing_of_this_name\n", "in line 2: ModuleNotFoundError"),
        (HEAD + DOUBLED.replace("doubled", "mxfp4"), "in line 2: ValueError: 'mxfp4' is the name"),
        ("x = 1\n", "registers no quantizer"),
    ],
)
def test_a_faulty_file_is_refused_with_its_line(write_file, text, error):
    before = list(sys.path)
    with pytest.raises(QuantizerError, match=error):
        load_quantizers(write_file(text))
    assert sys.path == before


def test_a_missing_file_and_another_kind_are_refused(write_file, tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        load_quantizers(tmp_path / "none.py")
    with pytest.raises(QuantizerError, match=r"ends in \.py"):
        load_quantizers(write_file("x = 1", "mine.txt"))


# -- helper modules --------------------------------------------------------------------------------


def test_two_files_have_each_its_own_module_of_one_name(write_file, tmp_path):
    for name, factor in (("first", 3), ("second", 5)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "shared_name.py").write_text(f"FACTOR = {factor}\n")
        text = DOUBLED.replace("doubled", name).replace("2", "FACTOR")
        (folder / f"{name}.py").write_text(f"{HEAD}from shared_name import FACTOR\n{text}")
    for _ in range(2):
        for name, factor in (("first", 3), ("second", 5)):
            load_quantizers(tmp_path / name / f"{name}.py")
            assert fake_quantize(torch.ones(4), name).eq(factor).all()


def test_a_module_that_was_there_before_stays(write_file, tmp_path, monkeypatch):
    """A module of the same name as a helper, and one that the file has nothing to do with."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "known_before.py").write_text("FACTOR = 7\n")
    monkeypatch.syspath_prepend(elsewhere)
    shared = importlib.import_module("known_before")
    write_file("FACTOR = 3\n", "known_before.py")
    write_file("raise RuntimeError('nobody imports this')\n", "json.py")
    before, path_before = dict(sys.modules), list(sys.path)
    text = f"import known_before\n{HEAD}" + DOUBLED.replace("2", "known_before.FACTOR")
    load_quantizers(write_file(text, "reads_known_before.py"))
    assert fake_quantize(torch.ones(4), "doubled").eq(3).all()
    assert sys.path == path_before
    assert before.items() <= sys.modules.items()
    assert sys.modules.pop("known_before") is shared and shared.FACTOR == 7


@pytest.mark.parametrize("fault", ["raise ValueError('odd')", "x = (", "import nothing_of_this"])
def test_a_module_with_an_error_leaves_nothing_behind(write_file, fault):
    before, path_before = dict(sys.modules), list(sys.path)
    write_file(f"{fault}\n", "faulty_helper.py")
    with pytest.raises(QuantizerError, match=r"broken\.py"):
        load_quantizers(write_file(f"import faulty_helper\n{HEAD}{DOUBLED}", "broken.py"))
    assert sys.path == path_before
    assert sys.modules.items() == before.items()


def test_a_package_may_import_its_own_modules(write_file):
    write_file("from .values import FACTOR\n", "own_package/__init__.py")
    write_file("FACTOR = 3\n", "own_package/values.py")
    path = write_file(HEAD + "from own_package import FACTOR\n" + DOUBLED.replace("2", "FACTOR"))
    load_quantizers(path)
    assert fake_quantize(torch.ones(4), "doubled").eq(3).all()


@pytest.mark.parametrize("first", ["from .sub.values import FACTOR\n", "import own_package.sub\n"])
def test_a_module_of_a_package_may_import_from_it(write_file, first):
    """Quantizers of other modules of the package are not those of the file."""
    write_file("FACTOR = 3\n", "own_package/sub/values.py")
    write_file("from .values import FACTOR\n", "own_package/sub/__init__.py")
    write_file("from . import other, mine\n", "own_package/__init__.py")
    write_file(HEAD + DOUBLED.replace("doubled", "other"), "own_package/other.py")
    factor = "FACTOR" if "FACTOR" in first else "own_package.sub.FACTOR"
    path = write_file(first + HEAD + DOUBLED.replace("2", factor), "own_package/mine.py")
    before = list(sys.path)
    assert load_quantizers(path) == load_quantizers(path) == ["doubled"]
    assert fake_quantize(torch.ones(4), "doubled").eq(3).all()
    assert sys.path == before
    path.write_text(path.read_text() + "x = 1 / 0\n")
    with pytest.raises(QuantizerError, match=r"mine\.py cannot be run, in line 6: ZeroDivision"):
        load_quantizers(path)


def test_a_file_may_define_a_dataclass_with_late_annotations(write_file):
    """Dataclasses look the module of such a class up."""
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    klass = "@dataclass\nclass Factor:\n    value: int = 3\n"
    load_quantizers(write_file(head + HEAD + klass + DOUBLED.replace("2", "Factor().value")))
    assert fake_quantize(torch.ones(4), "doubled").eq(3).all()


# -- the quantizers of a run -----------------------------------------------------------------------


def rows_of(path):
    return {name: PluginRow("mine.py", "", p.declaration) for name, p in declared(path).items()}


def test_the_rows_of_a_run_get_their_functions(write_file):
    path = write_file(HEAD + DOUBLED.replace('"doubled"', '"doubled", block=4, options={"n": 1}'))
    rows = rows_of(path) | {"declared_only": PluginRow()}
    for name, row in rows.items():
        row.declare(name)
    load_rows(rows, path.parent)
    assert fake_quantize(torch.ones(4), "doubled").eq(2).all()
    assert PLUGINS["declared_only"].function is None


# What a file does when it is run, beside what its text declares.
REGISTERS = {
    "another argument": DOUBLED + 'quantizer("doubled", block=32)(doubled)\n',
    "another option": DOUBLED + 'quantizer("doubled", options={"n": 1})(doubled)\n',
    "one more": DOUBLED + 'quantizer("more")(doubled)\n',
    "one of a helper": "import helper_with_one\n" + DOUBLED,
    "none of the name": "quantizer = lambda name: (lambda function: function)\n" + DOUBLED
    + "from mqo.quant import quantizer as real\nreal('other')(doubled)\n",
}  # fmt: skip


@pytest.mark.parametrize("text", REGISTERS.values(), ids=REGISTERS)
def test_a_file_that_registers_something_else_than_its_text_declares_is_refused(write_file, text):
    write_file(HEAD + DOUBLED.replace("doubled", "hidden"), "helper_with_one.py")
    path = write_file(HEAD + text)
    rows = rows_of(path)
    assert list(rows) == ["doubled"]
    with pytest.raises(QuantizerError, match=r"mine\.py registers "):
        load_rows(rows, path.parent)


def test_a_row_whose_file_is_gone_or_changed_is_refused(write_file):
    path = write_file(HEAD + DOUBLED)
    rows = rows_of(path)
    write_file(HEAD + DOUBLED.replace('"doubled"', '"doubled", block=8'))
    with pytest.raises(QuantizerError, match="doubled"):
        load_rows(rows, path.parent)
    path.unlink()
    with pytest.raises(QuantizerError, match=r"mine\.py"):
        load_rows(rows, path.parent)
