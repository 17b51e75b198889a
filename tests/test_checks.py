"""The checks before a commit are those of CI."""

import re
import shlex
import tomllib

import pytest
import yaml
from mqo.project import Project
from packaging.specifiers import SpecifierSet

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


def test_the_code_hosts_workflow_runs_ci_on_every_supported_python():
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    supported = SpecifierSet(project["requires-python"])
    every = {f"3.{minor}" for minor in range(30) if f"3.{minor}" in supported}
    assert set(job["strategy"]["matrix"]["python"]) == every


def test_each_version_of_the_changelog_has_a_date():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased, *versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert unreleased == "Unreleased"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", one) for one in versions)
