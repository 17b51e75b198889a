"""The life of a sweep: what runs at once, what is tried again, and what an ended one leaves."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from mqo.sweep import configs
from mqo.sweep.pool import Pool
from mqo.sweep.state import SweepFolder

from .conftest import Said, program

THREE = "bf16,FA_mxfp8,linear_mxfp8"


def test_every_job_runs_once_and_its_result_is_kept(sweep, folder):
    entries, view = sweep(THREE)
    assert {entry.state for entry in entries.values()} == {"done"}
    assert {entry.attempts for entry in entries.values()} == {1}
    assert {(e.iterations, e.train_loss, e.valid_loss, e.seconds) for e in entries.values()} == {
        (2, 7.5, 7.25, 1.5)
    }
    assert folder.read() == list(entries.values())
    place = view.lines.index("done     llama32-1b_wikipedia_bf16")
    assert view.lines[place + 1] == "  step      2/8  loss 7.5000  validation loss 7.2500"


def test_each_job_has_the_share_of_its_slot(sweep, folder):
    entries, _ = sweep(THREE, '(run / "slot").write_text(os.environ["SLOT"])', slots=2)
    found = [(folder.run_of(entry).root / "slot").read_text() for entry in entries.values()]
    assert set(found) == {"0", "1"}


def test_two_jobs_run_at_the_same_time(sweep, tmp_path):
    """Each waits for the other, on a pipe that opens for two alone."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    sweep("bf16,FA_mxfp8", f'open({str(pipe)!r}, "w" if mode == "bf16" else "r").close()')


def test_the_second_run_skips_what_is_done(sweep):
    first, _ = sweep("bf16,FA_mxfp8")
    again, view = sweep(THREE, 'assert mode == "linear_mxfp8"')
    assert [again[name] for name in first] == list(first.values())
    assert view.lines[0] == "started  llama32-1b_wikipedia_linear_mxfp8"


def test_a_run_whose_run_folder_is_gone_runs_again(sweep, folder):
    (entry,) = sweep()[0].values()
    folder.run_of(entry).result.unlink()
    (again,) = sweep()[0].values()
    assert (again.state, again.attempts, again.run) == ("done", 2, f"{entry.run}_2")


def test_a_crashed_run_is_tried_once_more(sweep, folder):
    body = 'if not run.name.endswith("_2"): sys.exit("mqo: GuardError: qk never ran")'
    (entry,) = sweep(body=body)[0].values()
    assert (entry.state, entry.attempts, entry.reason) == ("done", 2, "")
    assert entry.run == "llama32-1b_wikipedia_bf16_2"


def test_a_run_that_fails_twice_is_told_and_stops_no_other(sweep):
    body = 'if mode == "bf16": print("words"); sys.exit("mqo: RunError: out of steps.")'
    entries, view = sweep(THREE, body, slots=1)
    failed = entries["llama32-1b_wikipedia_bf16"]
    assert (failed.state, failed.attempts) == ("failed", 2)
    assert failed.reason == "RunError: out of steps."
    assert [entry.state for entry in entries.values()].count("done") == 2
    told = [line for line in view.lines if line.startswith("failed")]
    endings = ["out of steps; it will be tried again", "out of steps"]
    assert [line.partition("RunError: ")[2] for line in told] == endings
    # The others came before the second try.
    assert view.lines.index(told[1]) == len(view.lines) - 1


def test_a_failed_run_runs_again_with_the_next_sweep(sweep):
    (failed,) = sweep(body="sys.exit(3)")[0].values()
    assert (failed.state, failed.reason) == ("failed", "exit code 3: it printed nothing")
    (entry,) = sweep()[0].values()
    assert (entry.state, entry.attempts) == ("done", 3)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ValueError('no such head')", "exit code 1: ValueError: no such head"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL"),
        ("os._exit(0)", "exit code 0: it printed nothing"),
    ],
)
def test_the_reason_is_the_jobs_own_word(sweep, body, reason):
    (entry,) = sweep(body=body)[0].values()
    assert (entry.state, entry.reason) == ("failed", reason)


class Scripted:
    """An executor whose jobs end when they are told to."""

    slots = 2

    def __init__(self):
        self.started = []

    def start(self, run, slot):
        self.started.append(run)
        return self

    def poll(self):
        return None

    def terminate(self):
        pass


def test_a_job_waits_while_another_writes_the_index_that_they_share(folder):
    asked = configs.jobs("llama32-1b", "wikipedia", THREE, "tiny")
    executor = Scripted()
    pool = Pool(folder, asked, executor, Said())
    pool._fill()
    pool._fill()
    assert len(executor.started) == 1
    row = {"iteration": 1, "name": "lm loss", "value": "nan"}
    executor.started[0].metrics.write_text(json.dumps(row) + "\n")
    pool._collect()
    pool._fill()
    assert len(executor.started) == 2


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_an_ended_sweep_leaves_no_process_and_the_right_state(tmp_path, signum):
    """The jobs hold a pipe open: a byte from each says that it runs, the end that both are gone."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    body = f'pipe = open({str(pipe)!r}, "wb", buffering=0); pipe.write(b"x"); signal.pause()'
    code = f"""
        import sys
        from pathlib import Path
        from mqo.sweep import configs, local
        from mqo.sweep.pool import Pool
        from mqo.sweep.state import SweepFolder
        from mqo.sweep.table import Lines
        from rich.console import Console
        local.command = lambda run, *rest: [sys.executable, "-c", {program(body)!r}, str(run.root)]
        asked = configs.jobs("llama32-1b", "all", "bf16,FA_mxfp8", "tiny")
        folder, executor = SweepFolder(Path({str(tmp_path)!r})), local.Local([{{}}, {{}}])
        Pool(folder, asked, executor, Lines(Console())).run()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    sweep = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with pipe.open("rb", buffering=0) as reader:
        assert reader.read(1) + reader.read(1) == b"xx"
        sweep.send_signal(signum)
        assert reader.read(1) == b"", "a job lives on"
    said, _ = sweep.communicate()
    assert sweep.returncode != 0
    assert said.endswith("ended    0 of 4 done; the same command continues this sweep\n")
    states = [(entry.state, entry.reason) for entry in SweepFolder(tmp_path).read()]
    assert states == [("queued", "the sweep was ended")] * 2 + [("queued", "")] * 2


def test_the_job_of_a_killed_sweep_ends_with_it(tmp_path):
    """The part of a sweep that starts a job, killed; the job holds a pipe open as long as it is."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    job = f"""
        import os, signal
        from mqo.sweep import job
        job._end_with(os.environ["MQO_SWEEP"])
        pipe = open({str(pipe)!r}, "wb", buffering=0)
        pipe.write(b"x")
        signal.pause()
    """
    starter = f"""
        import sys
        from pathlib import Path
        from mqo.runs import RunFolder
        from mqo.sweep import local
        local.command = lambda run, *rest: [sys.executable, "-c", {textwrap.dedent(job)!r}]
        local.Local([{{}}]).start(RunFolder(Path({str(tmp_path)!r})), 0)
        __import__("signal").pause()
    """
    sweep = subprocess.Popen([sys.executable, "-c", textwrap.dedent(starter)])
    with pipe.open("rb", buffering=0) as reader:
        assert reader.read(1) == b"x"
        sweep.kill()
        assert reader.read(1) == b"", "the job lives on"
    sweep.wait()
