"""The life of a training process, with a small program of our own in its place."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from mqo.errors import DiskFullError, RunError
from mqo.launch import run as launch
from mqo.launch.checkpoint_lock import LockLostError
from mqo.launch.config import Cluster, RunConfig, resolve
from mqo.launch.folder import create
from mqo.launch.machine import imagined
from mqo.launch.plan import layout_of
from mqo.launch.prepare import RunData
from mqo.launch.source import PROGRAM
from mqo.megatron.run.files import TRACKER
from mqo.overlay.snapshot import Snapshot
from mqo.overlay.tree import Tree
from mqo.project import Project
from mqo.runs import RunFolder, latest
from mqo.scale.layout import Layout

NAMES = ("llama32-1b", "wikipedia", "bf16", "smoke")
CONFIG = resolve(*NAMES)


def train(folder, program, report=lambda text: None, *, behind=(), config=CONFIG):
    """`behind` are words that a run with torchrun has."""
    command = [sys.executable, "-c", textwrap.dedent(program), *behind]
    launch._train(folder, command, {"METRICS": str(folder.metrics)}, config, report, list)


def sum_up(folder, config, types=None, seconds=1.0, corpus_tokens=None):
    data = RunData(folder.root, folder.root, corpus_tokens)
    return launch._sum_up(folder, config, data, types or {}, seconds)


@pytest.fixture
def folder(tmp_path):
    return create(tmp_path / "with space", "title")


WRITE = """
    import json, os
    def row(iteration, name, value):
        with open(os.environ["METRICS"], "a") as lines:
            lines.write(json.dumps({"iteration": iteration, "name": name, "value": value}) + "\\n")
        print("some output", flush=True)
"""


def test_progress_and_result_come_from_the_metrics(folder):
    said = []
    program = (
        WRITE
        + """
    row(1, "lm loss", 8.0); row(2, "lm loss", 7.5); row(160, "lm loss", 6.5)
    row(160, "lm loss validation", 6.25)
    """
    )
    train(folder, program, said.append)
    assert [text.split(maxsplit=2)[2] for text in said] == [
        "loss 8.0000",
        "loss 6.5000",
        "validation loss 6.2500",
    ]
    result = sum_up(folder, CONFIG, {"qk": "mxfp8"}, 9.6, 4096)
    assert (result.iterations, result.train_loss, result.valid_loss) == (160, 6.5, 6.25)
    assert result.line() == (
        "validation loss 6.2500, training loss 6.5000 (chance: 8.32) after 160 steps in 10 s; "
        "qk=mxfp8"
    )
    assert folder.log.read_text() == "some output\n" * 4


def test_what_torchrun_leaves_in_the_temporary_folder_is_removed(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(tmp_path.iterdir())
    train(folder, "import tempfile; print(tempfile.mkdtemp(prefix='torchelastic_'))")
    left = folder.log.read_text().strip()
    assert left.startswith(str(tmp_path)) and not Path(left).exists()
    assert set(tmp_path.iterdir()) == before


def test_of_a_student_the_loss_that_it_is_trained_on_counts(folder):
    student = CONFIG.changed("experiment", teacher=folder.root)
    train(folder, WRITE + "    row(4, 'logits loss', 0.5); row(4, 'kd loss', 0.75)\n")
    assert sum_up(folder, student).train_loss == 0.75


def test_a_failure_is_told_in_the_programs_own_words(folder):
    with pytest.raises(RunError, match=r"0 of 160 steps: GuardError: qk never .*log\.txt") as error:
        train(
            folder,
            f"""
            import sys
            open({str(folder.failure)!r}, "w").write("GuardError: qk never ran\\n")
            sys.exit(3)
        """,
        )
    assert error.value.exit_code == 3


@pytest.mark.parametrize("behind", [(), (launch.TORCHRUN,)], ids=["alone", "torchrun"])
def test_a_training_that_saved_and_left_on_request_is_to_be_tried_again(folder, behind):
    """The worker itself has the launcher asked, until it is told to end."""
    worker = f"""
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
while signal.sigtimedwait([signal.SIGTERM], 0.05) is None:
    os.kill({os.getpid()}, signal.SIGUSR1)
"""
    program = f"""
        import subprocess, sys
        sys.exit(subprocess.run([sys.executable, "-c", {worker!r}]).returncode)
    """
    with pytest.raises(RunError, match="CHECKPOINT") as error:
        train(folder, program if behind else worker, behind=behind)
    assert error.value.exit_code == os.EX_TEMPFAIL


def test_a_training_that_had_ended_when_it_was_asked_to_leave_has_its_result(folder):
    program = f"""
import os, signal
from pathlib import Path
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
while signal.sigtimedwait([signal.SIGTERM], 0.05) is None:
    os.kill({os.getpid()}, signal.SIGUSR1)
Path({str(folder.ended)!r}).write_text('{{"steps": 160}}')
"""
    train(folder, program)


def saved_at(step, folder):
    folder.mkdir()
    (folder / TRACKER).write_text(str(step))
    return CONFIG.changed("experiment", checkpoint=folder)


@pytest.mark.parametrize("name", ["lm loss validation", None])
@pytest.mark.parametrize("ended", ['{"steps": 0}', None], ids=["our program", "a checkout's"])
def test_a_run_that_only_validates_has_a_result_without_a_training_loss(
    folder, tmp_path, name, ended
):
    config = saved_at(160, tmp_path / "saved")
    if ended:
        folder.ended.write_text(ended)
    rows = [{"iteration": 160, "name": name, "value": 6.25}] if name else []
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = sum_up(folder, config)
    valid = 6.25 if name else None
    assert (result.iterations, result.train_loss, result.valid_loss) == (160, None, valid)
    assert "160 steps of an earlier run" in result.line()


def test_a_run_that_trained_and_recorded_no_loss_is_a_failure(folder, tmp_path):
    config = saved_at(160, tmp_path / "saved")
    folder.ended.write_text('{"steps": 4}')
    with pytest.raises(RunError, match=f"'lm loss' in {folder.metrics}"):
        sum_up(folder, config)


@pytest.mark.parametrize(("rows", "done"), [((), 120), ((121, 125), 125)])
def test_a_failure_says_after_how_many_steps(folder, tmp_path, rows, done):
    """Those that an earlier run trained count."""
    lines = [{"iteration": n, "name": "lm loss", "value": 8.0} for n in rows]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in lines))
    config = saved_at(120, tmp_path / "saved")
    with pytest.raises(RunError, match=f"{done} of 160 steps: ValueError: odd"):
        train(folder, "raise ValueError('odd')", config=config)


def test_a_node_without_losses_knows_no_step(folder):
    config = resolve(*NAMES, cluster=Cluster(nnodes=2))
    with pytest.raises(RunError, match=r"^Training failed: ValueError: odd"):
        train(folder, "raise ValueError('odd')", config=config)


def test_a_warning_of_the_program_is_passed_on(folder):
    said = []
    train(folder, 'print("mqo: warning: little room"); print("mqo: a note")', said.append)
    assert said == ["warning  : little room"]
    assert folder.log.read_text() == "mqo: warning: little room\nmqo: a note\n"


def test_a_log_that_has_no_room_ends_the_run_and_names_the_disk(folder):
    folder.log.symlink_to("/dev/full")
    data = RunData(folder.root, folder.root, None)
    command = [sys.executable, "-c", "print('some output')"]
    with pytest.raises(DiskFullError, match=str(folder.root)):
        launch.train(folder, CONFIG, command, {}, data, {}, print)


def test_a_process_that_a_signal_ended_has_the_shells_exit_code(folder):
    with pytest.raises(RunError, match=r"0 of 160 steps: rank 0 .*SIGKILL") as error:
        train(folder, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert error.value.exit_code == 128 + 9


# A worker that the kernel kills, as it does when memory is short. Its helper has the worker's
# output, as the one has that upstream's first save starts, and would run on.
KILLED = """
import os, signal, subprocess, sys
helper = "import signal; pipe = open({pipe!r}, 'wb', 0); pipe.write(b'xx'); signal.pause()"
subprocess.Popen([sys.executable, "-c", helper], start_new_session={apart})
open({pipe!r}, "rb", 0).read(1)
print("last words", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("apart", [False, True], ids=["its session", "another session"])
def test_what_a_killed_process_leaves_behind_is_ended_and_holds_nothing_up(folder, tmp_path, apart):
    os.mkfifo(pipe := str(tmp_path / "pipe"))
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(RunError, match="SIGKILL"):
        train(folder, KILLED.format(pipe=pipe, apart=apart))
    assert folder.log.read_text() == "last words\n"
    os.set_blocking(reader, True)
    assert os.read(reader, 2) == b"x"
    assert os.read(reader, 1) == b"", "the helper lives on"
    os.close(reader)


def test_an_error_behind_which_the_process_aborted_comes_first(folder):
    with pytest.raises(RunError, match="0 of 160 steps: ValueError: no such head size"):
        train(folder, "import os; print('ValueError: no such head size', flush=True); os.abort()")


def test_a_run_of_one_process_needs_no_torchrun(folder):
    """And says to torch.distributed what torchrun would."""
    data = RunData(folder.root, folder.root, None)
    for processes in (1, 2):
        cell = resolve(*NAMES, cluster=Cluster(nproc_per_node=processes))
        machine = imagined("h100-80gb", processes)
        command, env = launch.build_command(
            Project.here(), cell, machine, folder, data, folder.source
        )
        assert (launch.TORCHRUN in command) == (processes == 2)
        assert ("RANK" in env) == (processes == 1)
        assert str(folder.source / "pretrain_gpt.py") in command[:7]


def test_a_run_of_two_nodes_says_to_torchrun_where_they_are(folder):
    where = Cluster(nnodes=2, node_rank=1, master_addr="a", master_port=7, nproc_per_node=4)
    cell, machine = resolve(*NAMES, cluster=where), imagined("h100-80gb", 4)
    data = RunData(folder.root, folder.root, None)
    command, _ = launch.build_command(Project.here(), cell, machine, folder, data, folder.source)
    words, program = command[command.index(launch.TORCHRUN) + 1 :], str(folder.source / PROGRAM)
    assert " ".join(words[: words.index(program)]) == (
        "--nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr a --master-port 7"
    )


def test_of_several_nodes_only_the_last_must_have_recorded_losses(folder):
    first, last = (resolve(*NAMES, cluster=Cluster(nnodes=2, node_rank=rank)) for rank in (0, 1))
    assert (
        sum_up(folder, first, seconds=1.4).line() == "trained in 1 s; the last node has the losses"
    )
    with pytest.raises(RunError, match=f"'lm loss' in {folder.metrics}"):
        sum_up(folder, last)


RANK_FAILED = """
import sys
print("[rank0]: Traceback, and so on")
print("[rank0]: a.b.GuardError: no such layer")
sys.exit("torch.distributed.elastic.errors.ChildFailedError:")
"""
OURS_FIRST = """
print("mqo: the source is not patched. Expected: a patched one.")
raise RuntimeError("later")
"""
NOTE = 'print("mqo: norms torch.RMSNorm; fusions none", flush=True); mine()'


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ('print("before"); raise ValueError("no such head size")', "ValueError: no such head size"),
        (RANK_FAILED, r"\[rank0\]: a\.b\.GuardError: no such"),
        (OURS_FIRST, "mqo: the source is not patched"),
        (NOTE, "NameError: name 'mine'"),  # a note of ours is no error
    ],
)
def test_without_a_failure_file_the_log_is_searched_for_an_error(folder, program, error):
    with pytest.raises(RunError, match=f"0 of 160 steps: {error}"):
        train(folder, program)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_launcher_leaves_no_process_behind(tmp_path, signum):
    """The launcher as a process of its own, which starts a worker that starts a worker.

    The innermost holds a pipe open: a byte says that it runs, the pipe's end that it is gone.
    """
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    worker = (
        f"p = open({str(pipe)!r}, 'wb', buffering=0); p.write(b'x'); __import__('signal').pause()"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    code = f"""
        import sys
        from pathlib import Path
        from mqo.launch import run
        from mqo.launch.folder import create
        from mqo.launch.config import resolve
        of = resolve("llama32-1b", "wikipedia", "bf16", "smoke")
        folder = create(Path({str(tmp_path)!r}), "run")
        run._train(folder, [sys.executable, "-c", {parent!r}], {{}}, of, print, list)
    """
    launcher = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
    with pipe.open("rb", buffering=0) as reader:
        assert reader.read(1) == b"x"
        launcher.send_signal(signum)
        assert reader.read(1) == b"", "the worker lives on"
    assert launcher.wait() != 0


def test_a_run_on_gpus_is_started_in_the_planners_layout_and_says_so(tmp_path, monkeypatch):
    made = resolve("llama31-8b", "wikipedia", "bf16", "standard", cluster=Cluster(nproc_per_node=8))
    fakes = {
        "check_config": None,
        "detect": imagined("h100-80gb", 8),
        "ready_tree": Tree(tmp_path),
        "ready_data": RunData(tmp_path, tmp_path, None),
        "take_source": Snapshot(Tree(tmp_path), made.quantization.types, made.quantization.types),
    }
    for name, value in fakes.items():
        monkeypatch.setattr(launch, name, lambda *args, value=value, **rest: value)
    monkeypatch.setattr(launch.coverage, "record", lambda *args: None)
    monkeypatch.setattr(launch, "check_run", lambda *args: [])
    monkeypatch.setattr(launch, "train", lambda folder, config, command, *rest: command)
    folder, said = create(tmp_path / "runs", "one"), []
    command = launch.run(Project.here(), made, report=said.append, folder=folder)
    assert layout_of(command, 8) == Layout(8, tensor=2)
    assert RunConfig.read(folder).placement.layout == Layout(8, tensor=2).flags()
    (line,) = [text for text in said if text.startswith("layout")]
    assert "TP 2, DP 4, distributed optimizer; simulated: 56.0 of 71.2 GiB" in line


def test_two_runs_of_one_second_get_two_folders(tmp_path):
    made = {create(tmp_path, "same").root for _ in range(3)}
    assert len(made) == 3
    assert all(path.is_dir() for path in made)


def test_metrics_are_read_back_exactly_and_a_torn_last_line_is_left_out(tmp_path):
    folder = RunFolder(tmp_path)
    value = 8.373268127441406
    rows = [
        {"iteration": 1, "name": "lm loss", "value": value},
        {"iteration": 2, "name": "lm loss", "value": "nan"},
        {"iteration": 3, "name": "lm loss", "value": "inf"},
    ]
    folder.metrics.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"iteration": 4, "na')
    losses = folder.read_metrics()["lm loss"]
    assert losses[0] == (1, value)
    assert losses[1][1] != losses[1][1]
    assert losses[2:] == [(3, float("inf"))]


def test_the_latest_run_is_the_newest_that_recorded_anything(tmp_path):
    for name, recorded in (("2026-01-01_a", True), ("2026-01-02_b", True), ("2026-01-03_c", False)):
        (tmp_path / name).mkdir()
        if recorded:
            (tmp_path / name / "metrics.jsonl").write_text("")
    assert latest(tmp_path).root.name == "2026-01-02_b"
    with pytest.raises(RunError, match=f"{tmp_path}/2026-01-01_a"):
        latest(tmp_path / "2026-01-01_a")


def test_a_training_that_lost_its_lock_is_killed_and_saves_no_more(folder, tmp_path):
    class Lost:
        def add(self, pid):
            pass

        def beat(self):
            if "ready" in folder.log.read_text():
                raise LockLostError("another run took it")

    program = f"""
        import signal
        def save(*words):
            open({str(tmp_path / "saved")!r}, "w").close()
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        while True:
            signal.pause()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with pytest.raises(LockLostError):
        launch._train(folder, command, {}, CONFIG, lambda text: None, list, Lost())
    assert not (tmp_path / "saved").exists()
