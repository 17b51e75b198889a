"""The tutorials: each command is one that there is, and pasted one by one they run to their end."""

import argparse
import contextlib
import os
import re
import shlex
import subprocess
import textwrap
from pathlib import Path

import click
import pytest
from mqo import cli
from mqo.commands.quant_type_modifier import options_of as options_of_modifier
from mqo.errors import MqoError
from mqo.launch.arguments import parser, split_flags
from typer.main import get_command

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
HEREDOC = re.compile(r"<<\s*(['\"]?)(\w+)\1([^\n]*)\n.*?^\2$", re.DOTALL | re.MULTILINE)
OURS = re.compile(r"(?:.*/)?(?:mqo|quant_type_modifier)|script/\S+\.(?:py|sh)")

each_tutorial = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


def blocks(path):
    """What a reader pastes, in order."""
    return BLOCK.findall(path.read_text(encoding="utf-8"))


def commands(code):
    """[program, *arguments] of each command of a shell program that is ours."""
    found = []
    for line in HEREDOC.sub(r"\3", code).replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&`")
        lexer.whitespace_split = True
        current = None
        for word in lexer:
            if re.fullmatch(r"[();<>|&`]+", word):
                current = None
            elif current is not None:
                current.append(word)
            elif OURS.fullmatch(word):
                current = [word]
                found.append(current)
    return found


def refusal(program, *arguments):
    """Why a program would not take these arguments; None where it would."""
    name = Path(program).name
    try:
        if program.startswith("script/") and not (ROOT / program).is_file():
            return "there is no such file"
        if name == "mqo" and arguments[:1] != ("train",):
            parse_mqo(arguments)
        elif name.startswith("quant_type_modifier"):
            options_of_modifier(arguments)
        else:  # the generated scripts hand what they are given to train_config.py
            own, _ = split_flags(list(arguments[name == "mqo" :]))
            parser(front_end=name == "flash_attention_config.py").parse_intermixed_args(own)
    except (click.UsageError, argparse.ArgumentError, MqoError) as error:
        return str(error)
    return None


def parse_mqo(arguments):
    """Raise UsageError where mqo has no such command, or the command no such option."""
    command, words = get_command(cli.app), list(arguments)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name = words.pop(0)
        if (command := command.commands.get(name)) is None:
            raise click.UsageError(f"there is no command {name}")
    with contextlib.suppress(click.exceptions.Exit):  # --help, --version
        command.make_context("mqo", words)


def test_commands_are_found_and_what_there_is_not_is_refused():
    code = """\
        A=1 .venv/bin/mqo plot runs/*/a -o "a b.png" | tail -n 3  # words
        .venv/bin/python - <<'END' | head
        mqo nothing
        END
        python3 script/train_config.py --model llama32-1b \\
            --dataset wikipedia -- --seed 3 && mqo recipe show hif4
        """
    found = commands(textwrap.dedent(code))
    assert found == [
        [".venv/bin/mqo", "plot", "runs/*/a", "-o", "a b.png"],
        shlex.split("script/train_config.py --model llama32-1b --dataset wikipedia -- --seed 3"),
        ["mqo", "recipe", "show", "hif4"],
    ]
    assert [refusal(*words) for words in found] == [None, None, None]
    for words in ("nothing", "report --nothing", "recipe nothing", "sweep --jobs many", "train -x"):
        assert refusal("mqo", *words.split()), words
    for name in ("train_config.py", "flash_attention_config.py", "quant_type_modifier.py"):
        assert refusal(f"script/{name}", "--nothing"), name
    assert refusal("script/nothing.py")


@each_tutorial
def test_each_command_of_a_tutorial_is_one_that_there_is(path):
    found = commands("\n".join(blocks(path)))
    assert found
    assert {shlex.join(words): fault for words in found if (fault := refusal(*words))} == {}


@pytest.mark.heavy
@each_tutorial
def test_a_tutorial_runs_from_start_to_end_in_a_fresh_clone(path, tmp_path):
    clone, home = tmp_path / "a clone", tmp_path / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(blocks(path))],
        cwd=clone,
        env=os.environ | {"HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]
