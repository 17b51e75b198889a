"""The benchmarks in one run, and how a part that fails is shown."""

import shlex
import subprocess
import sys

import pytest
from mqo.project import Project

pytest.importorskip("torch")
ROOT = Project.here().root


@pytest.fixture
def parts(benchmark_module):
    return benchmark_module("parts")


@pytest.fixture
def program(benchmark_module):
    return benchmark_module("cpu_all")


def test_a_part_that_fails_is_shown_and_counts(parts):
    fails = parts.Part("A fault", "", "-c 'print(5); raise SystemExit(3)'", "Nothing.")
    text, code = parts.run(fails, rehearsal=True)
    assert code == 3
    assert "FAILED, exit 3" in text
    late = parts.Part("Late", "", "-c 'import time; time.sleep(60)'", "Nothing.", limit_s=1)
    assert parts.run(late, rehearsal=True)[1] == 124


def test_a_failure_ends_the_run_behind_its_last_part(parts, tmp_path):
    two = [parts.Part(f"Part {n}", "", f"-c 'raise SystemExit({n})'", "Nothing.") for n in (1, 0)]
    target = tmp_path / "all.md"
    with pytest.raises(SystemExit, match="failed: Part 1"):
        parts.run_all(two, True, target, "# All")
    assert "## Part 0" in target.read_text()


def test_each_part_is_a_program_that_is_there(program):
    for part in program.PARTS:
        for words in (part.words, part.small):
            assert (ROOT / shlex.split(words)[0]).is_file()


@pytest.mark.heavy
def test_the_rehearsal_runs_every_part(program, tmp_path):
    target = tmp_path / "cpu.md"
    words = [sys.executable, "benchmarks/cpu_all.py", "--rehearse", "--out", str(target)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, target.read_text() + done.stderr
    assert target.read_text().count("\n## ") == len(program.PARTS)
