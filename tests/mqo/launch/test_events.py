"""Metrics from TensorBoard's events, for programs that write no others."""

import pytest
from mqo.launch.events import copy_events
from mqo.runs import RunFolder

pytest.importorskip("torch")


@pytest.fixture
def events(tmp_path):
    """A function that adds (tag, value, iteration, seconds of the epoch) to events in a folder."""
    from torch.utils.tensorboard import SummaryWriter

    def add(*rows):
        with SummaryWriter(str(tmp_path / "events of a run")) as writer:
            for tag, value, iteration, when in rows:
                writer.add_scalar(tag, value, iteration, walltime=when)
        return tmp_path / "events of a run"

    return add


def test_scalars_of_this_run_alone_become_metrics(events, tmp_path):
    events(("lm loss", 9.0, 1, 100.0))
    folder = events(
        ("lm loss", 8.5, 1, 200.0),
        ("lm loss vs samples", 8.5, 4, 200.0),
        ("lm loss validation", float("nan"), 1, 201.0),
        ("lm loss", 8.25, 2, 202.0),
    )
    run = RunFolder(tmp_path)
    copy_events(folder, run, since=150.0)
    found = run.read_metrics()
    assert found["lm loss"] == [(1, 8.5), (2, 8.25)]
    ((iteration, value),) = found["lm loss validation"]
    assert iteration == 1
    assert value != value
    assert list(found) == ["lm loss", "lm loss validation"]


def test_no_events_are_no_metrics(tmp_path):
    copy_events(tmp_path / "nowhere", RunFolder(tmp_path), since=0)
    assert RunFolder(tmp_path).read_metrics() == {}
