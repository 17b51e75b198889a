"""`mqo sensitivity` around its program: the ranking, the files, and what is refused before."""

import json
import tomllib

import pytest
from mqo.errors import CheckpointError
from mqo.megatron.run.files import TRACKER
from mqo.sensitivity import measure

pytest.importorskip("matplotlib")


@pytest.fixture
def given(monkeypatch, facts):
    """What the program is given; it writes `facts`."""
    words = []

    def run(tree, model, quant, program, before, after, **watching):
        words.append((quant, before, after))
        return dict(facts)

    monkeypatch.setattr(measure, "run", run)
    return words


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / TRACKER).write_text("8")
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("rank", "order"),
    [
        ("gradient", ["output_layer", "decoder.layers.1.*", "decoder.layers.0.*"]),
        ("loss", ["decoder.layers.0.*", "output_layer", "decoder.layers.1.*"]),
    ],
)
def test_the_largest_change_is_first(command_line, given, checkpoint, here, rank, order):
    words = ("sensitivity", checkpoint, "--mode", "mxfp4", "--rank", rank)
    code, out, _ = command_line(*words)
    assert code == 0
    rows = [line.split()[0] for line in out.splitlines() if "%" in line]
    assert rows == ["everything", *order]
    assert (here / "sensitivity.png").read_bytes().startswith(b"\x89PNG")
    assert not (here / "sensitivity.toml").exists()
    (_, before, after) = given[0]
    assert before == "sensitivity"
    text = {"data": [], "tokens": 4096, "tokenizer": None}
    assert after == {"choice": text, "ignored": [], "by": "block"}
    table = json.loads(command_line(*words, "--json")[1])
    assert [row["name"] for row in table["changes"]] == order
    assert table["files"] == [str(here / "sensitivity.png")]


def test_a_change_that_is_not_a_number_is_first(command_line, given, facts, checkpoint, here):
    facts["changes"][0]["gradient"] = float("nan")
    words = ("sensitivity", checkpoint, "--mode", "mxfp4", "--json")
    table = json.loads(command_line(*words)[1])
    assert table["changes"][0]["gradient"] == "nan"


def test_the_recipe_is_next_to_the_picture(command_line, given, checkpoint, here):
    words = ("--recipe", "nvfp4", "--with", "output_layer", "--rules", "70%", "-o", "a/b.svg")
    code, out, _ = command_line("sensitivity", checkpoint, *words)
    assert code == 0
    assert out.splitlines()[-2:] == [str(here / "a/b.svg"), str(here / "a/b.toml")]
    assert (here / "a/b.svg").read_text().startswith("<?xml")
    recipe = tomllib.loads((here / "a/b.toml").read_text())
    assert recipe["rules"] == [
        {"layers": "output_layer", "quant_type": "none"},
        {"layers": "decoder.layers.1.*", "quant_type": "none"},
    ]
    assert command_line("recipe", "show", here / "a/b.toml")[0] == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "--mode"),
        (("--mode", "mxfp4", "--by", "head"), "'head'"),
        (("--mode", "mxfp4", "--rank", "size"), "'size'"),
        (("--mode", "mxfp4", "-o", "a.gif"), "a.gif"),
        (("--mode", "mxfp4", "--rules", "20"), "percentage"),
        (("--mode", "mxfp4", "--rules", "20%", "--by", "gemm"), "--by gemm"),
        (("--mode", "mxfp4", "--rules", "20%", "--by", "operand"), "--by operand"),
        (("--mode", "mxfp4", "--data", "a", "--text", "b"), "--text"),
        (("--mode", "mxfp4", "--with", "output_layer"), "--recipe"),
        (("--mode", "mxfp4", "--rules", "20%", "-o", "a.png"), "keeps nothing"),
    ],
)
def test_what_has_no_effect_is_refused(command_line, given, checkpoint, here, words, text):
    code, _, errors = command_line("sensitivity", checkpoint, *words)
    assert (code, len(errors.strip().splitlines()) <= 2) == (2, True)
    assert text in errors
    assert {path.name for path in here.iterdir()} == {"saved"}


def test_an_error_of_the_program_leaves_no_file(command_line, monkeypatch, checkpoint, here):
    def run(*words, **watching):
        raise CheckpointError("It is damaged")

    monkeypatch.setattr(measure, "run", run)
    assert command_line("sensitivity", checkpoint, "--mode", "mxfp4")[0] == 2
    assert {path.name for path in here.iterdir()} == {"saved"}
