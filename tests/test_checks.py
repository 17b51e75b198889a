"""The checks before a commit are those of CI."""

import shlex

import pytest
import yaml
from mqo.project import Project

ROOT = Project.here().root
PYTHON = ".venv/bin/python"


@pytest.fixture(scope="module")
def hooks():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    return [(repo["repo"], hook) for repo in config["repos"] for hook in repo["hooks"]]


def test_hooks_come_from_nowhere_else(hooks):
    assert {repo for repo, _ in hooks} == {"local"}
    assert {hook["language"] for _, hook in hooks} == {"system"}


def test_ci_makes_the_same_checks_first(hooks):
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    checks = [shlex.split(line) for line in lines if line.startswith('"$python" -m ')]
    assert [[PYTHON, *words[1:]] for words in checks] == [
        shlex.split(hook["entry"]) for _, hook in hooks
    ]
