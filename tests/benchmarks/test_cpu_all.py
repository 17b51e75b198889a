"""The benchmarks in one run, and how a part that fails is shown."""

import shlex
import subprocess
import sys

import pytest
from mqo.project import Project

pytest.importorskip("torch")
ROOT = Project.here().root


@pytest.fixture
def runner(benchmark_module):
    return benchmark_module("runner")


@pytest.fixture
def program(benchmark_module):
    return benchmark_module("cpu_all")


def test_a_part_that_fails_is_shown_and_counts(runner):
    fails = runner.Benchmark("A fault", "", "-c 'print(5); raise SystemExit(3)'", "Nothing.")
    text, code = runner.run(fails, rehearsal=True)
    assert code == 3
    assert "FAILED, exit 3" in text
    late = runner.Benchmark("Late", "", "-c 'import time; time.sleep(60)'", "Nothing.", limit_s=1)
    assert runner.run(late, rehearsal=True)[1] == 124


def test_a_failure_ends_the_run_after_its_last_part(runner, tmp_path):
    commands = {n: f"-c 'raise SystemExit({n})'" for n in (1, 0)}
    two = [runner.Benchmark(f"Part {n}", "", words, "Nothing.") for n, words in commands.items()]
    target = tmp_path / "all.md"
    with pytest.raises(SystemExit, match="failed: Part 1"):
        runner.run_all(two, True, target, "# All")
    assert "## Part 0" in target.read_text()


def test_each_part_is_a_program_that_is_there(program):
    for benchmark in program.BENCHMARKS:
        for words in (benchmark.command, benchmark.small_command):
            assert (ROOT / shlex.split(words)[0]).is_file()


@pytest.mark.heavy
def test_the_rehearsal_runs_every_part(program, tmp_path):
    target = tmp_path / "cpu.md"
    words = [sys.executable, "benchmarks/cpu_all.py", "--rehearse", "--out", str(target)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, target.read_text() + done.stderr
    assert target.read_text().count("\n## ") == len(program.BENCHMARKS)
