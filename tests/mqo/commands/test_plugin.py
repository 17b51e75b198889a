"""`mqo plugin`: the file that it writes passes its own check, and faults have an exit code."""

import json

import pytest
from mqo.cli import app
from mqo.errors import OutputError, PluginError
from typer.testing import CliRunner

WRONG = """
from mqo.quant import quantizer

@quantizer("wrong")
def wrong(x, context):
    return x + 1
"""


def run(*words):
    return CliRunner().invoke(app, ["plugin", *map(str, words)])


@pytest.mark.slow
def test_a_new_file_passes_its_check(tmp_path):
    path = tmp_path / "a folder" / "my_int4.py"
    done = run("new", path)
    assert done.exit_code == 0 and str(path) in done.output
    done = run("check", path)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("quantizer my_int4\n")
    assert max(map(len, done.output.splitlines())) <= 80


@pytest.mark.slow
def test_a_check_that_fails_has_exit_code_1(tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    done = run("check", tmp_path / "wrong.py", "--json")
    assert done.exit_code == 1
    (report,) = json.loads(done.output)["quantizers"]
    faults = {check["check"] for check in report["checks"] if check["fault"]}
    assert (report["name"], report["passed"]) == ("wrong", False)
    assert "zeros stay zero" in faults


@pytest.mark.slow
def test_an_error_in_the_file_is_one_paragraph(tmp_path):
    (tmp_path / "wrong.py").write_text("import nothing_of_this_name\n")
    error = run("check", tmp_path / "wrong.py").exception
    assert isinstance(error, PluginError)
    assert "in line 1: ModuleNotFoundError" in str(error)


def test_a_missing_file_is_refused(tmp_path):
    assert isinstance(run("check", tmp_path / "none.py").exception, PluginError)


@pytest.mark.parametrize("name", ["mxfp4.py", "Mine.py", "class.py", "mine.txt", "2.py", ".py"])
def test_a_name_that_no_quantizer_may_have_is_refused(tmp_path, name):
    assert isinstance(run("new", tmp_path / name).exception, OutputError)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_not_replaced(tmp_path):
    (tmp_path / "mine.py").write_text("kept")
    assert isinstance(run("new", tmp_path / "mine.py").exception, OutputError)
    assert (tmp_path / "mine.py").read_text() == "kept"
