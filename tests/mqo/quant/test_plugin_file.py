"""Files with quantizers of the user: what is registered, and the errors of their code."""

import sys

import pytest
import torch
from mqo.quant.backend import fake_quantize
from mqo.quant.plugin_calls import QuantizerError
from mqo.quant.plugin_file import load_quantizers
from mqo.quant.plugins import PLUGINS

HEAD = "from mqo.quant import quantizer\n"
DOUBLED = '@quantizer("doubled")\ndef doubled(x, context):\n    return 2 * x\n'


@pytest.fixture(autouse=True)
def no_plugin_left():
    yield
    PLUGINS.clear()


@pytest.fixture
def file(tmp_path):
    """A function that writes a file of Python in a folder whose name has a space."""

    def write(text, name="mine.py"):
        path = tmp_path / "a folder" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_all_quantizers_of_a_file_are_types_then(file):
    path = file(HEAD + DOUBLED + DOUBLED.replace("doubled", "other"))
    assert load_quantizers(path) == ["doubled", "other"]
    assert fake_quantize(torch.ones(4), "doubled").eq(2).all()


def test_a_file_may_import_modules_of_its_folder(file):
    file("FACTOR = 3\n", "helper_of_mine.py")
    before = list(sys.path)
    path = file(HEAD + "import helper_of_mine\n" + DOUBLED.replace("2", "helper_of_mine.FACTOR"))
    load_quantizers(path)
    assert fake_quantize(torch.ones(4), "doubled").eq(3).all()
    assert sys.path == before


def test_a_changed_file_replaces_its_quantizer(file):
    load_quantizers(file(HEAD + DOUBLED))
    assert load_quantizers(file(HEAD + DOUBLED.replace("2 *", "4 *"), "newer.py")) == ["doubled"]
    assert fake_quantize(torch.ones(4), "doubled").eq(4).all()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x = (\n", r"mine\.py cannot be run, in line 1: SyntaxError"),
        ("x = 1\nimport nothing_of_this_name\n", "in line 2: ModuleNotFoundError"),
        (HEAD + DOUBLED.replace("doubled", "mxfp4"), "in line 2: ValueError: 'mxfp4' is the name"),
        ("x = 1\n", "registers no quantizer"),
    ],
)
def test_a_faulty_file_is_refused_with_its_line(file, text, error):
    before = list(sys.path)
    with pytest.raises(QuantizerError, match=error):
        load_quantizers(file(text))
    assert sys.path == before


def test_a_missing_file_and_another_kind_are_refused(file, tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        load_quantizers(tmp_path / "none.py")
    with pytest.raises(QuantizerError, match=r"ends in \.py"):
        load_quantizers(file("x = 1", "mine.txt"))
