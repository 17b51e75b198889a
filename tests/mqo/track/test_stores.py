"""Runs in each tracker, for real and offline, read back from what it wrote."""

import io
import os
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
from mqo.runs import SWEEP, RunFolder
from mqo.track import content, mlflow, sent, session, wandb
from mqo.track.tracker import Sent

from .conftest import (
    INPUTS,
    PICTURE,
    ROWS,
    add_rows,
    draw,
    make_run,
    mqo_track,
    wandb_records,
)

pytestmark = pytest.mark.slow


def texts(metrics):
    """Metrics that are equal where they are the same, NaN too."""
    return {name: repr(series) for name, series in metrics.items()}


def only(store):
    (run,) = store.runs()
    return run


def test_a_run_is_there_whole(store, tmp_path):
    run = make_run(tmp_path / "a sweep" / "one")
    (tmp_path / "a sweep" / SWEEP).write_text("{}")
    said = session.track(run, store.name, draw)
    found = only(store)
    assert sent.read(run)[store.name].id in said
    assert (found.name, found.group, found.status) == ("one", "a sweep", "finished")
    expected = content.parameters(run)
    kept = expected if store.name == "wandb" else {k: str(v) for k, v in expected.items()}
    assert found.parameters == kept
    assert texts(found.metrics) == texts(run.read_metrics())
    assert sum(map(len, found.metrics.values())) == len(ROWS)
    assert sorted(found.files) == sorted([*INPUTS, "source.tar.gz", "result.json"])
    for name in (*INPUTS, "result.json"):
        assert found.files[name] == (run.root / name).read_bytes()
    with tarfile.open(fileobj=io.BytesIO(found.files["source.tar.gz"])) as tar:
        assert (
            tar.extractfile("source/megatron/layers.py").read()
            == (run.source / "megatron" / "layers.py").read_bytes()
        )
    assert found.pictures == [PICTURE]


def test_a_run_that_failed_is_closed_as_failed(store, tmp_path):
    run = make_run(tmp_path / "one", result=False)
    session.track(run, store.name, draw)
    found = only(store)
    assert found.status == "failed"
    assert found.files["failure.txt"] == b"GuardError: qk never ran\n"


def test_the_second_time_nothing_is_sent(store, tmp_path):
    run = make_run(tmp_path / "one")
    session.track(run, store.name, draw)
    before = only(store)
    assert "nothing was sent" in session.track(run, store.name, draw)
    assert texts(only(store).metrics) == texts(before.metrics)


@pytest.mark.parametrize("noted", [2, 4])
def test_what_was_cut_short_is_completed_in_the_same_run(store, tmp_path, noted):
    """Four rows were sent; a kill may come before the last of them are noted."""
    run = make_run(tmp_path / "one", ROWS[:4], result=False)
    session.track(run, store.name, draw)
    known = sent.read(run)[store.name]
    sent.write(run, store.name, replace(known, rows=noted, status=None))
    add_rows(run, ROWS[4:])
    run.result.write_text("{}")
    session.track(run, store.name, draw)
    found = only(store)
    assert found.status == "finished"
    assert texts(found.metrics) == texts(run.read_metrics())
    assert sent.read(run)[store.name] == Sent(known.id, len(ROWS), "finished")


def test_however_often_it_is_cut_short_it_is_one_run(store, tmp_path):
    run = make_run(tmp_path / "one")
    for _ in range(4):
        session.track(run, store.name, draw)
        known = sent.read(run)[store.name]
        sent.write(run, store.name, replace(known, status=None))
    assert texts(only(store).metrics) == texts(run.read_metrics())


def test_a_store_that_lacks_the_run_gets_it_anew(store, tmp_path):
    run = make_run(tmp_path / "one")
    sent.write(run, store.name, Sent("0123456789abcdef", 3))
    session.track(run, store.name, draw)
    assert texts(only(store).metrics) == texts(run.read_metrics())


def test_nothing_secret_and_nothing_of_this_machine_is_kept(store, tmp_path):
    """The command of a user, with tokens in the environment and no other variables."""
    run = make_run(tmp_path / "one")
    tokens = {"WANDB_API_KEY": "5ec4e7" * 7, "MLFLOW_TRACKING_TOKEN": "5ec4e7-mlflow"}
    tokens |= {"MLFLOW_TRACKING_PASSWORD": "5ec4e7-password", "HF_TOKEN": "hf_5ec4e7"}
    tokens |= {"AWS_SECRET_ACCESS_KEY": "5ec4e7-aws", "HOSTNAME": "host-5ec4e7", "USER": "5ec4e7"}
    names = ("MLFLOW_TRACKING_URI", "WANDB_MODE", "WANDB_DATA_DIR", "WANDB_CACHE_DIR")
    given = {k: v for k, v in store.variables.items() if k in names}
    home = tmp_path / "home"
    home.mkdir()
    done = mqo_track(
        *(run.root, "--tracker", store.name),
        **(given | tokens | {"HOME": str(home), "PATH": os.environ["PATH"]}),
    )
    assert done.returncode == 0, done.stderr
    found = only(store)
    assert found.files["quant.toml"] == run.quant_config.read_bytes()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    holding = [path for path in written if b"5ec4e7" in path.read_bytes()]
    assert holding == []
    # By itself a tracker would gather the command, the user, the host, its load and the commit.
    if store.name == "mlflow":
        assert {path.name for path in store.root.glob("*/*/tags/*")} == {"mlflow.runName"}
        return
    (file,) = (path for path in written if path.suffix == ".wandb")
    records = list(wandb_records(file))
    kinds = {record.WhichOneof("record_type") for record in records}
    expected = ("header", "run", "telemetry", "metric", "artifact", "summary", "history", "exit")
    assert kinds == set(expected)
    (host,) = (record.run.host for record in records if record.HasField("run"))
    assert host == ""
    assert [path.name for path in (file.parent / "files").rglob("*")] == []


def test_runs_that_begin_at_once_share_an_experiment(mlflow_store):
    """Each waits for the other between its look for the experiment and the making of it."""
    both = threading.Barrier(2)

    def begin(name):
        made = mlflow.Mlflow()
        look = made.client.get_experiment_by_name

        def look_and_wait(experiment):
            found = look(experiment)
            with suppress(threading.BrokenBarrierError):  # where the other may not look yet
                both.wait(1)
            return found

        made.client.get_experiment_by_name = look_and_wait
        return made.create(RunFolder(mlflow_store.root / name))

    with ThreadPoolExecutor(2) as pool:
        ids = set(pool.map(begin, ("one", "two")))
    assert len(ids) == 2
    experiments = mlflow.Mlflow().client.search_experiments()
    assert [one.name for one in experiments].count("mqo") == 1


def test_a_password_in_the_address_is_not_printed(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="the extra `trackers` is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:5ec4e7@host/path")
    made = mlflow.Mlflow()
    monkeypatch.setattr(made.client, "set_terminated", lambda *rest: None)
    made.id = "1"
    assert made.end("finished") == "run 1 in https://host/path"


def test_what_weights_and_biases_gathers_after_some_seconds_is_off():
    """The run of the test above is over before."""
    chosen = wandb.settings(pytest.importorskip("wandb"))
    assert chosen.x_disable_meta and chosen.x_disable_machine_info and chosen.x_disable_stats
    assert chosen.disable_git and chosen.disable_code and not chosen.save_code
    assert chosen.console == "off"
