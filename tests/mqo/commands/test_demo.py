"""`mqo demo`: which runs it trains, and that it compares them."""

import pytest
from mqo.commands import sweep as sweeps
from mqo.launch import machine
from mqo.project import Project
from mqo.sweep.state import Entry

from ..report.conftest import make_run

pytest.importorskip("matplotlib")
pytest.importorskip("plotly")


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """The configurations that were trained, all but those of `failing` successfully."""
    monkeypatch.setattr(Project, "runs", tmp_path / "runs")
    monkeypatch.setattr(machine, "detect", lambda: machine.Machine(2, 0))
    configs = []

    def train(project, folder, planned, executor):
        for job in planned:
            configs.append(job.config)
            mode, seed = job.config.quantization.mode, job.config.experiment.extra_flags[-1]
            loss = 6.0 if mode == "bf16" else 6.06 + 0.001 * int(seed)
            make_run(folder.root / job.name, mode, seed=seed, loss=loss)
        state = "failed" if train.fails else "done"
        return [Entry(job.name, job.digest, state) for job in planned]

    train.fails = False
    monkeypatch.setattr(sweeps, "run_jobs", train)
    return configs, train


def test_two_modes_are_trained_with_three_seeds_and_compared(command_line, trained, tmp_path):
    code, out, err = command_line("demo")
    assert (code, err) == (0, "")
    configs, _ = trained
    assert (
        sorted(config.quantization.mode for config in configs)
        == ["FA_linear_mxfp4"] * 3 + ["bf16"] * 3
    )
    assert len({config.experiment.extra_flags for config in configs}) == 3
    page = tmp_path / "runs/demo/report/index.html"
    assert str(page) in out and page.is_file()
    assert "3 seeds would detect" in out


def test_after_a_failed_run_nothing_is_compared(command_line, trained, tmp_path):
    trained[1].fails = True
    code, out, _ = command_line("demo", "-o", tmp_path / "mine")
    assert (code, out) == (1, "")
    assert not (tmp_path / "mine/report").exists()
