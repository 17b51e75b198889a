"""A sweep whose run is tracked while it trains for real, in MLflow's folder."""

import io
import tarfile

import pytest
from mqo.launch.command import from_shell
from mqo.runs import RunFolder
from mqo.sweep.state import SweepFolder

pytest.importorskip("torch")
pytest.importorskip("mlflow", reason="the extra `trackers` is not installed")
from .mqo.track.conftest import MlflowStore
from .real_runs import TINY, launched
from .vendored_tree import PROJECT as PROJECT

pytestmark = pytest.mark.slow

WORDS = ("--models", "llama32-1b", "--datasets", "wikipedia", "--modes", "FA_mxfp8")


def test_a_tracked_sweep_is_a_group_and_the_same_sweep_as_without(tmp_path, monkeypatch):
    store, folder = MlflowStore(tmp_path), tmp_path / "a sweep"
    for name, value in store.variables.items():
        monkeypatch.setenv(name, value)
    sweep = ("-m", "mqo", "sweep", *WORDS, "-o", folder)
    done = launched(*sweep, "--tracker", "mlflow", "--", *TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    (entry,) = SweepFolder(folder).read()
    run = RunFolder(folder / entry.run)
    (found,) = store.runs()
    assert (found.name, found.group, found.status) == (entry.name, "a sweep", "finished")
    assert found.metrics == run.read_metrics()
    assert len(found.metrics["lm loss"]) == 6
    assert found.files["overlay.diff"] == run.overlay_diff.read_bytes()
    with tarfile.open(fileobj=io.BytesIO(found.files["source.tar.gz"])) as tar:
        program = tar.extractfile("source/pretrain_gpt.py").read()
    assert program == (run.source / "pretrain_gpt.py").read_bytes()
    assert len(found.pictures) >= 1 and found.pictures[0].startswith(b"\x89PNG")
    # Nothing that decides the run names the tracker: without one it is done already.
    assert "mlflow" not in run.config.read_text() + " ".join(from_shell(run.command.read_text())[0])
    again = launched(*sweep, "--", *TINY)
    assert "1 of 1 runs are done already and skipped" in again.stdout
