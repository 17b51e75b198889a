"""What a script asks of the launcher."""

from pathlib import Path

import pytest
from mqo.errors import MqoError
from mqo.project import Project
from mqo.simulate.script import arguments

SCRIPTS = Project.here().root / "script"


@pytest.mark.parametrize("path", sorted(SCRIPTS.glob("*/*.sh")), ids=lambda path: path.stem)
def test_each_generated_script_names_its_cell(path):
    words, of_attention = arguments(path)
    model, dataset, mode = (
        words[words.index(name) + 1] for name in ("--model", "--dataset", "--quantization")
    )
    assert path.name == f"pretrain_{model}_{dataset}_{mode}.sh"
    assert not of_attention
    assert "$@" not in words


@pytest.mark.parametrize(
    ("name", "of_attention"), [("train_config.py", False), ("flash_attention_config.py", True)]
)
def test_a_front_end_asks_for_nothing_itself(name, of_attention):
    assert arguments(SCRIPTS / name) == ([], of_attention)


def test_a_script_of_ones_own_may_give_more(tmp_path):
    script = tmp_path / "my run.sh"
    command = '"$HOME/mqo/script/flash_attention_config.py" --model "a b"'
    lines = ["#!/bin/bash", "# train_config.py in a comment", "set -e"]
    lines += [f"python3 {command} \\", '  --recipe nvfp4 "$@" -- --lr 1', ""]
    script.write_text("\n".join(lines))
    assert arguments(script) == (["--model", "a b", "--recipe", "nvfp4", "--", "--lr", "1"], True)


def test_a_script_may_call_the_command(tmp_path):
    assert arguments(Path("train")) == ([], False)
    script = tmp_path / "run.sh"
    script.write_text("set -e\n.venv/bin/mqo report\n.venv/bin/mqo train --model x -- --lr 1\n")
    assert arguments(script) == (["--model", "x", "--", "--lr", "1"], False)


@pytest.mark.parametrize(
    "text",
    [
        "echo nothing\n",
        "mqo sweep train --model x\n",
        "train --model x\n",
        "python3 train_config.py --model $MODEL\n",
        "python3 'train_config.py\n",
        "",
    ],
)
def test_a_script_that_does_not_say_is_refused(text, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(text)
    with pytest.raises(MqoError):
        arguments(script)


def test_a_variable_of_the_shell_is_named(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("python3 train_config.py --model $MODEL\n")
    with pytest.raises(MqoError) as error:
        arguments(script)
    assert str(error.value) == (
        f"{script} uses $MODEL of the shell. Expected: a script that calls `mqo train`, "
        "train_config.py or flash_attention_config.py with plain words, as in script/; or `train` "
        "or one of these two, followed by its options."
    )


def test_no_file_and_no_text_are_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "gone.sh", tmp_path, tmp_path / "binary"):
        with pytest.raises(MqoError):
            arguments(path)


def test_nothing_of_a_script_is_run(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"touch {tmp_path}/ran\npython3 train_config.py --model x\n")
    assert arguments(script)[0] == ["--model", "x"]
    assert not (tmp_path / "ran").exists()
