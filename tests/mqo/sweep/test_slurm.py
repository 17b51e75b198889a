"""Slurm's options, and jobs by submitit's own executor for machines without Slurm."""

import sys

import pytest
from mqo.errors import MqoError, SetupError
from mqo.sweep import configs, slurm
from mqo.sweep.pool import Pool

from .conftest import Said, program


def test_options_are_pairs_with_numbers_as_such():
    assert slurm.options("partition=gpu, time=600,,constraint=a=b") == {
        "partition": "gpu",
        "time": 600,
        "constraint": "a=b",
    }
    with pytest.raises(MqoError, match=r"--slurm .*'gpu'.*KEY=VALUE"):
        slurm.options("partition=a,gpu")


def test_without_submitit_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(SetupError, match=r"submitit .*pip install.*\[slurm\]"):
        slurm.Slurm(folder, {}, 1)


@pytest.fixture
def submit(folder, monkeypatch):
    """A function that runs two jobs through submitit, without Slurm."""
    pytest.importorskip("submitit")

    def run(body=""):
        words = [sys.executable, "-c", program(body)]
        monkeypatch.setattr(slurm, "command", lambda run, *rest: [*words, str(run.root)])
        asked = configs.jobs("llama32-1b", "wikipedia", "bf16,FA_mxfp8", "tiny")
        options = slurm.options("cluster=local,partition=gpu,timeout_min=5")
        pool = Pool(folder, asked, slurm.Slurm(folder, options, 2), Said())
        pool.warm = {job.data_key for job in asked}
        return pool.run()

    return run


def test_submitted_jobs_end_well(submit):
    assert {entry.state for entry in submit().values()} == {"done"}


def test_a_submitted_job_that_fails_says_why(submit):
    entries = submit('if mode == "bf16": sys.exit("mqo: out of steps")')
    assert {(entry.state, entry.reason) for entry in entries.values()} == {
        ("failed", "out of steps"),
        ("done", ""),
    }


def test_options_that_submitit_does_not_know_are_refused(folder):
    pytest.importorskip("submitit")
    with pytest.raises(MqoError, match=r"--slurm: .*no_such"):
        slurm.Slurm(folder, {"cluster": "local", "no_such": "x"}, 1)
    with pytest.raises(MqoError, match=r"--slurm: .*nowhere"):
        slurm.Slurm(folder, {"cluster": "nowhere"}, 1)
