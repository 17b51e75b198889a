"""What version 0.1 wrote, in this version: a sweep that was killed half-way, and options of a run.

of_0_1 holds the text files, with other paths and fewer packages. The command was `mqo sweep
--models llama32-1b --datasets wikipedia --modes bf16,FA_mxfp8 --seeds 1,2 --jobs 1 -o FOLDER`.
"""

import shutil
from pathlib import Path

import pytest
from mqo.errors import MqoError
from mqo.launch.config import Cluster
from mqo.report.collect import collect
from mqo.sweep import configs
from mqo.sweep.state import SweepFolder

OLD = Path(__file__).with_name("of_0_1")


@pytest.fixture
def old(tmp_path):
    shutil.copytree(OLD, tmp_path / "sweep")
    return SweepFolder(tmp_path / "sweep")


def jobs(**rest):
    names = ("llama32-1b", "wikipedia", "bf16,FA_mxfp8", "tiny")
    more = {"gemms": "fprop", "exclude": (), "dtype": None, "cluster": Cluster()}
    return configs.jobs(*names, seeds=[1, 2], **more | rest)


def test_the_same_command_goes_on_where_the_sweep_was_killed(old):
    entries = old.entries(jobs())
    states = ["done", "done", "queued", "queued"]
    assert [entries[job.name].state for job in jobs()] == states
    assert [entries[job.name].digest for job in jobs()] == [job.digest for job in jobs()]


def test_another_command_is_refused(old):
    with pytest.raises(MqoError, match="with other settings"):
        old.entries(jobs(extra_flags=("--lr", "1")))


def test_its_runs_are_compared(old):
    runs, left_out = collect([old.root])
    found = [(run.variant, run.seed, run.steps) for run in runs]
    assert found == [("bf16", "1", 8), ("bf16", "2", 8)]
    assert [one.what for one in left_out] == ["unfinished", "not started"]


def test_its_options_are_read_by_the_programs():
    config = pytest.importorskip("mqo.quant.config")
    found = config.load(OLD / "mxfp4.toml")
    assert (found.block, found.exclude) == (16, ("*.0.mlp.linear_fc2",))
    assert [phase.quant_type for phase in found.phases("dgrad")] == ["mxfp4", "none"]
