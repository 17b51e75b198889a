"""What waits for a GPU, rehearsed on a CPU."""

import subprocess
import sys

import pytest

from .. import forking

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture
def program(benchmark_module):
    return benchmark_module("gpu_all")


TRAINS = ("benchmarks/step.py", "benchmarks/gpu_memory.py", "script/train_config.py")


def started(words, run=subprocess.run, **options):
    """Run a program as the runner does; what programs that train start is forked."""
    return run(forking.launcher(*words) if words[1] in TRAINS else words, **options)


@pytest.mark.slow
def test_the_rehearsal_runs_every_part(program, monkeypatch, tmp_path):
    kernels, *rest = program.BENCHMARKS  # the first ones are tests, which run elsewhere
    files = [word for word in kernels.small_command.split() if word.endswith(".py")]
    assert files and all((program.ROOT / file).is_file() for file in files)
    monkeypatch.setattr(program, "BENCHMARKS", tuple(rest))
    target = tmp_path / "gpu.md"
    monkeypatch.setattr(sys, "argv", ["gpu_all.py", "--rehearse", "--out", str(target)])
    monkeypatch.setattr(sys.modules["runner"].subprocess, "run", started)
    program.main()  # which exits if one fails
    text = target.read_text()
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
