"""The page on the original documents: its commands run, its paths and signatures exist."""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest

from ..vendored_tree import PROJECT, copy_checkout

TEXT = (PROJECT.root / "docs/original_documents.md").read_text(encoding="utf-8")
RUN, GREP, TRAIN, WORKFLOW = re.findall(r"^```bash\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
PATHS = sorted(set(re.findall(r"`((?:megatron|examples|script|tests|tools)/[\w./]*)`", TEXT)))
FUNCTIONS = re.findall(r"^\| `(\w+)\((.*?)\)`<br>`(\S+)` \|", TEXT, re.MULTILINE)


@pytest.fixture(scope="module")
def project(vendored, tmp_path_factory):
    """A copy of the checkout, with its .venv."""
    root = tmp_path_factory.mktemp("a copy")
    copy_checkout(vendored, root)
    for file in ("constraints.txt", "pyproject.toml"):
        shutil.copy(PROJECT.root / file, root / file)
    (root / ".venv").symlink_to(sys.prefix)
    return root


@pytest.fixture(scope="module")
def bash(project):
    """A function that runs a shell program in a folder of the copy."""
    path = f"{sys.prefix}/bin:{os.environ['PATH']}"

    def run(code, folder="script"):
        return subprocess.run(
            ["bash", "-c", code],
            env=os.environ | {"PATH": path},
            cwd=project / folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    return run


def sources(project):
    return {path: path.read_bytes() for path in (project / "Megatron-LM/megatron").rglob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("commands", "folder"), [(RUN, "script"), (GREP, "Megatron-LM")], ids=["mqo", "grep"]
)
def test_the_commands_run_as_documented(project, bash, commands, folder):
    before = sources(project)
    for command in commands.splitlines():
        done = bash(command, folder)
        assert (done.returncode, done.stdout != "") == (0, True), (command, done.stderr[-2000:])
    assert sources(project) == before


@pytest.mark.slow
@pytest.mark.parametrize("command", TRAIN.splitlines())
def test_a_training_command_is_refused_for_lack_of_data_alone(bash, command):
    done = bash(command)
    assert (done.returncode, done.stdout) == (2, "")
    assert "CHECKPOINT TENSORBOARD TOKENIZER DATA_PREFIX" in done.stderr


# One of each program: the others differ from the first of them in a word.
PLANNED = [command for command in TRAIN.splitlines() if re.search(r"deepseek2|fa-q|\.sh$", command)]


@pytest.mark.slow
@pytest.mark.parametrize("command", PLANNED)
def test_a_training_command_is_planned_without_data(bash, command):
    planned = bash(f"{command} --dry-run")
    assert (planned.returncode, "pretrain_gpt.py" in planned.stdout) == (0, True), planned.stderr


@pytest.mark.slow
def test_the_workflow_runs_to_its_end_and_leaves_the_tree_as_it_was(project, bash):
    before = sources(project)
    done = bash(WORKFLOW)
    assert done.returncode == 0, done.stderr[-2000:]
    planned = re.findall(r"^# source: fprop = (\w+)$", done.stdout, re.MULTILINE)
    assert planned == ["mxfp8", "mxfp4"]
    assert sources(project) == before


def test_there_is_something_to_check():
    lines = [block.splitlines() for block in (RUN, GREP, TRAIN, WORKFLOW)]
    assert [len(block) for block in [*lines, PLANNED]] == [9, 2, 5, 9, 3]
    assert (len(FUNCTIONS), len(PATHS) > 10) == (5, True)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_the_page_names_exists(vendored, path):
    assert (vendored.root / path).exists() or (PROJECT.root / path).exists()


@pytest.mark.parametrize(("name", "parameters", "path"), FUNCTIONS, ids=[f[0] for f in FUNCTIONS])
def test_a_function_has_the_documented_parameters(vendored, name, parameters, path):
    tree = ast.parse((vendored.root / path).read_text(encoding="utf-8"))
    found = [
        [argument.arg for argument in node.args.args]
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    documented = parameters.split(", ")
    assert documented in [names[: len(documented)] for names in found]
