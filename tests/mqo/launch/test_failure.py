"""Why a training ended: what of its words is the cause, and what follows from it."""

import signal

import pytest
from mqo.launch.failure import ended_by_signal, reason
from mqo.runs import RunFolder

GLOO = (
    "RuntimeError: [gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:25476: Connection reset "
    "by peer. Check the logs of the remote worker"
)


@pytest.fixture
def failed(tmp_path):
    """A function that makes a run's folder with a log and a failure.txt; its reason."""

    def make(log="", failure=None):
        folder = RunFolder(tmp_path)
        folder.log.write_text(log)
        if failure is not None:
            folder.failure.write_text(failure + "\n")
        return reason(folder)

    return make


def process(rank, pid, code, name="", traceback=None):
    """A process in torchrun's summary; `code` is its exit code."""
    said = traceback or f"Signal {-code} ({name}) received by PID {pid}"
    return (
        f"[{rank}]:\n  time      : 2026-11-22_14:28:53\n  host      : node7\n"
        f"  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {code} (pid: {pid}) {f' ({name})' if name else ''}\n"
        f"  error_file: <N/A>\n  traceback : {said}\n"
    )


def summary(root, *others):
    """Torchrun's summary: the root cause comes last."""
    failures = "".join(others) or "  <NO_OTHER_FAILURES>\n"
    return (
        "Traceback (most recent call last):\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\n"
        f"x.py FAILED\n----\nFailures:\n{failures}----\nRoot Cause (first observed failure):\n"
        f"{root}====\n"
    )


KILLED = process(1, 3132, -9, "SIGKILL")
STOPPED = process(0, 3131, -15, "SIGTERM")
RAISED = process(0, 3131, 1, traceback="To enable traceback see: https://pytorch.org/x.html")


# -- a process that a signal ended -------------------------------------------------------------


def test_a_killed_rank_comes_before_what_the_others_say_of_it(failed):
    text = failed(f"[rank0]: {GLOO}\n" + summary(KILLED, STOPPED), failure=GLOO)
    assert text.startswith("rank 1 (process 3132 on node7) was ended by SIGKILL")
    assert "out-of-memory" in text


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS", "SIGABRT"])
def test_of_other_signals_no_memory_is_suspected(failed, name):
    code = -signal.Signals[name]
    text = failed(summary(process(2, 7, code, name)))
    assert text == f"rank 2 (process 7 on node7) was ended by {name}"


def test_a_signal_without_a_name_has_its_number(failed):
    assert failed(summary(process(2, 7, -63, "?"))).endswith("was ended by signal 63")


def test_an_abort_may_follow_from_another_ranks_error(failed):
    aborted = process(1, 8, -6, "SIGABRT")
    log = "[rank0]: ValueError: no such head size\n" + summary(aborted, RAISED)
    assert failed(log) == "[rank0]: ValueError: no such head size"
    assert failed(summary(aborted, KILLED)).startswith("rank 1 (process 3132")


def test_the_root_cause_is_first(failed):
    found = ended_by_signal(summary(KILLED, STOPPED, process(2, 9, -11, "SIGSEGV")))
    assert [one.rank for one in found] == [1, 2, 0]


def test_a_summary_without_signals_names_none():
    assert ended_by_signal(summary(RAISED)) == []
    assert ended_by_signal("traceback : Signal 9 (SIGKILL)") == []


# -- words -------------------------------------------------------------------------------------


def test_the_programs_own_words_come_first(failed):
    text = "DivergenceError: NaN in the loss of rank 3 in step 7"
    assert failed(summary(KILLED), failure=text) == text


def test_a_lost_connection_comes_behind_any_error(failed):
    log = f"[rank1]: ValueError: no such head size\n[rank0]: {GLOO}\n"
    assert failed(log, failure=GLOO) == "[rank1]: ValueError: no such head size"
    text = failed(f"[rank0]: {GLOO}\n", failure=GLOO)
    assert text == f"{GLOO} (another process may have failed first: see the log of each node)"


def test_without_a_failure_file_the_last_lost_connection_is_told(failed):
    assert failed(f"[rank0]: {GLOO}\nbye\n").startswith(f"[rank0]: {GLOO} (another process")


def test_without_any_error_the_last_words_are_told(failed, tmp_path):
    assert failed("one\ntwo\n\n") == "two"
    assert failed("") == "it printed nothing"
    (tmp_path / "log.txt").unlink()
    assert reason(RunFolder(tmp_path)) == "it printed nothing"


def test_a_log_that_is_no_text_is_read(failed, tmp_path):
    failed()
    (tmp_path / "log.txt").write_bytes(b"\xff\xfe\nValueError: of bytes \xff\n")
    assert reason(RunFolder(tmp_path)).startswith("ValueError: of bytes")
