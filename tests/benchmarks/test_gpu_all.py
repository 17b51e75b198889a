"""What waits for a GPU, rehearsed on a CPU."""

import subprocess
import sys

import pytest
from mqo.project import Project

pytest.importorskip("triton", reason="triton is not installed")
ROOT = Project.here().root


@pytest.fixture
def program(benchmark_module):
    return benchmark_module("gpu_all")


@pytest.mark.slow
def test_the_rehearsal_runs_every_part(program, tmp_path):
    target = tmp_path / "gpu.md"
    words = [sys.executable, "benchmarks/gpu_all.py", "--rehearse", "--out", str(target)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    text = target.read_text()
    assert done.returncode == 0, text + done.stderr
    assert [title for title in text.splitlines() if title.startswith("## ")] == [
        f"## {benchmark.title}" for benchmark in program.BENCHMARKS
    ]
    assert text.count("Decides ") == len(program.BENCHMARKS)


def test_without_a_device_it_says_what_it_needs(program, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_all.py"])
    monkeypatch.setattr(program.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--rehearse"):
        program.main()


def test_a_rehearsal_says_which_packages_it_lacks(program, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["gpu_all.py", "--rehearse"])
    monkeypatch.setattr(program, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"Transformer Engine .*get_packages\.py"):
        program.main()
