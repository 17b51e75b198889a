"""`mqo train`: the parser and the code of script/train_config.py."""

import pytest
from mqo.commands import train_config
from mqo.launch import arguments

NAMES = ["--model", "llama32-1b", "--dataset", "wikipedia", "--quantization", "mxfp4"]


def test_its_help_is_that_of_the_parser(command_line, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = command_line("train", "--help")
    assert (code, err) == (0, "")
    assert out == arguments.parser(program="mqo train").format_help()
    assert out.startswith("usage: mqo train ")


def test_all_words_go_to_the_trainings_code(command_line, monkeypatch):
    seen = []
    monkeypatch.setattr(train_config, "train_with", lambda argv, program: seen.append(argv))
    words = [*NAMES, "a", "--json", "-x", "--", "--seed", "7", "--help"]
    assert command_line("train", *words)[0] == 0
    assert seen == [words]


@pytest.mark.parametrize("words", [[], ["--modle", "x"], [*NAMES, "--training-config", "big"]])
def test_what_it_refuses_is_one_paragraph(command_line, words):
    code, out, err = command_line("train", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("mqo: ")
