"""Sweeps whose jobs are quick programs of our own in the place of training."""

import sys
import textwrap

import pytest
from mqo.sweep import configs, local, pool
from mqo.sweep.local import Local
from mqo.sweep.pool import Pool
from mqo.sweep.state import SweepFolder

# What a job does that ends well: two steps, and a result.
WELL = """
    rows = [(1, "lm loss", 8.0), (2, "lm loss", 7.5), (2, "iteration-time", 0.5),
            (2, "lm loss validation", 7.25)]
    with open(run / "metrics.jsonl", "w") as lines:
        for iteration, name, value in rows:
            lines.write(json.dumps({"iteration": iteration, "name": name, "value": value}) + "\\n")
    result = {"iterations": 2, "train_loss": 7.5, "valid_loss": 7.25, "seconds": 1.5}
    result |= {"run": str(run), "vocab_size": 4096, "types": {}}
    (run / "result.json").write_text(json.dumps(result))
"""
HEAD = """
    import json, os, signal, sys
    from pathlib import Path
    run = Path(sys.argv[1])
    mode = json.loads((run / "cell.json").read_text())["quantization"]["mode"]
"""


def program(body=""):
    """A job that does `body`, which knows `run` and `mode`, and then what ends well."""
    return textwrap.dedent(HEAD) + textwrap.dedent(body) + textwrap.dedent(WELL)


class Said:
    """A view that keeps what it is told."""

    def __init__(self):
        self.lines, self.shown = [], []

    def say(self, text):
        self.lines.append(text)

    def show(self, entries, running):
        self.shown.append({name: progress.step for name, progress in running.items()})


@pytest.fixture
def folder(tmp_path):
    made = SweepFolder(tmp_path / "a sweep")
    made.root.mkdir()
    return made


@pytest.fixture
def sweep(folder, monkeypatch):
    """A function that runs jobs of these modes, each as the body of a program says."""

    def run(modes="bf16", body="", *, slots=2, **rest):
        words = [sys.executable, "-c", program(body)]
        monkeypatch.setattr(pool, "POLL_S", 0.02)
        monkeypatch.setattr(local, "command", lambda run, *rest: [*words, str(run.root)])
        asked = configs.jobs("llama32-1b", "wikipedia", modes, "tiny", **rest)
        view = Said()
        made = Pool(folder, asked, Local([{"SLOT": str(n)} for n in range(slots)]), view)
        made.warm = {job.data_key for job in asked}
        return made.run(), view

    return run
