"""`mqo formats`: all formats with their facts, and the faults of a file."""

import json

import pytest
from mqo.cli import app
from mqo.quant.formats import FORMATS
from mqo.untrusted import UntrustedFileError
from typer.testing import CliRunner

from ..own_format import FILE


def run(*words):
    return CliRunner().invoke(app, ["formats", *map(str, words)])


@pytest.mark.slow
def test_the_list_has_every_format_within_80_columns():
    text, rows = run().output, json.loads(run("list", "--json").output)["formats"]
    assert max(map(len, text.splitlines())) <= 80
    assert [row["name"] for row in rows] == list(FORMATS)
    assert [line.split()[0] for line in text.splitlines()[1 : len(FORMATS) + 1]] == list(FORMATS)
    (mxfp4,) = (row for row in rows if row["name"] == "mxfp4")
    assert mxfp4 | {"sqnr_db": round(mxfp4["sqnr_db"], 1)} == {
        "name": "mxfp4",
        "bits": 4.25,
        "element": "e2m1",
        "block": 32,
        "square": True,
        "scale": "e8m0",
        "block_scale": None,
        "smallest": 0.5,
        "largest": 6.0,
        "sqnr_db": 18.8,
        "source": FORMATS["mxfp4"].source,
    }


@pytest.mark.slow
def test_the_formats_of_a_file_are_measured(tmp_path):
    file = tmp_path / "own formats.toml"
    file.write_text(FILE)
    done = run("check", file, "--json")
    facts = json.loads(done.output)
    (row,) = facts["formats"]
    assert (done.exit_code, facts["faults"]) == (0, [])
    assert (row["name"], row["bits"], row["largest"]) == ("own7", 8.25, 30.0)
    assert 25 < row["sqnr_db"] < 40
    assert "own7" not in FORMATS


def test_each_bad_row_has_a_sentence_and_exit_code_1(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(FILE + FILE[FILE.index("[formats") :].replace("own7", "mxfp8"))
    done = run("check", file)
    assert done.exit_code == 1
    assert done.output.startswith("formats.mxfp8: ")
    assert "valid: own7" in done.output


@pytest.mark.parametrize("text", [None, "not toml", "[formats\n"])
def test_a_file_that_cannot_be_read_is_refused(text, tmp_path):
    file = tmp_path / "own.toml"
    if text is not None:
        file.write_text(text)
    assert isinstance(run("check", file).exception, UntrustedFileError)
