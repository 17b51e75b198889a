"""Relative paths in the user's flags mean the folder that the command was started in."""

import pytest
from mqo.launch.config import resolve
from mqo.launch.user_paths import absolute_paths


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--data-path", "../x"], ["--data-path", "/a/x"]),
        (["--data-path=../x"], ["--data-path=/a/x"]),
        (["--data-path", "/y"], ["--data-path", "/y"]),
        (
            ["--data-path", "0.3", "x", "7e-1", "y"],
            ["--data-path", "0.3", "/a/b/x", "7e-1", "/a/b/y"],
        ),
        (["--data-path", "s3://x/y"], ["--data-path", "s3://x/y"]),
        (["--pretrained-checkpoint", "q/int8"], ["--pretrained-checkpoint", "/a/b/q/int8"]),
        (["--save", "."], ["--save", "/a/b"]),
        (["--tokenizer-model", "org/model"], ["--tokenizer-model", "org/model"]),  # a hub's name
        (["--seed", "7", "--lr", "1e-3", "--swiglu"], ["--seed", "7", "--lr", "1e-3", "--swiglu"]),
        (["--transformer-impl", "local", "x"], ["--transformer-impl", "local", "x"]),
        ([], []),
    ],
)
def test_paths_are_made_absolute_and_other_words_kept(given, expected, tmp_path, monkeypatch):
    (tmp_path / "a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a/b")
    assert [word.replace(f"{tmp_path}/a", "/a") for word in absolute_paths(given)] == expected


def test_a_tokenizer_that_is_there_is_a_path(tmp_path, monkeypatch):
    (tmp_path / "tok").mkdir()
    monkeypatch.chdir(tmp_path)
    words = ["--tokenizer-model", "tok"]
    assert list(absolute_paths(words)) == [words[0], str(tmp_path / "tok")]


def test_a_configuration_holds_absolute_paths(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    made = resolve("llama32-1b", None, "bf16", "tiny", extra_flags=("--data-path", "../x"))
    assert made.experiment.extra_flags == ("--data-path", str(tmp_path / "x"))
