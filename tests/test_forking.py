"""A forked program cannot tell that it was forked."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mqo.launch.machine import torch_cuda

from . import forking

pytestmark = pytest.mark.skipif(torch_cuda() is not None, reason="a CUDA build is never forked")

TELL = """
import json, os, signal, sys, torch, warnings
facts = {
    "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "file": __file__, "name": __name__,
    "env": dict(os.environ), "threads": torch.get_num_threads(),
    "group": os.getpgrp() == os.getpid(),
    "main": sys.modules["__main__"].__dict__ is globals(), "ignored": str(signal.getsignal(12)),
    "ours": sorted(n for n in sys.modules if n.partition(".")[0] in ("megatron", "mqo")),
}
print(json.dumps(facts))
print("to the other", file=sys.stderr)
"""


@pytest.fixture
def program(tmp_path):
    """A function that makes a command of a program."""

    def make(text, *words, options=()):
        path = tmp_path / "program.py"
        path.write_text(text)
        return [sys.executable, *options, str(path), *words]

    return make


def both(command, **options):
    """(code, output, error) of the command, fresh and forked."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    for start in (forking.fresh, forking.forked):
        with start(command, **pipes, **options) as process:
            yield (*process.communicate(), process.returncode)


@pytest.mark.parametrize(
    "options",
    [("-u",), *(pytest.param(o, marks=pytest.mark.heavy) for o in [(), ("-I", "-W", "ignore")])],
)
def test_it_finds_what_a_fresh_process_finds(program, tmp_path, options):
    env = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": f"{tmp_path}/a:/b", "WHO": "me"}
    old = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        command = program(TELL, "one", "two three", options=options)
        fresh, forked = both(command, cwd=tmp_path, env=env)
    finally:
        signal.signal(signal.SIGUSR2, old)
    assert json.loads(forked[0]) == json.loads(fresh[0])
    assert json.loads(forked[0])["ours"] == []
    assert forked[1:] == fresh[1:] == ("to the other\n", 0)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('why')", 1),
        ("raise ValueError('no such head size')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import os; os.abort()", -6),
        ("import atexit; atexit.register(print, 'at the end')", 0),
        ("import threading; threading.Timer(0, print, ('late',)).start()", 0),
        ("import os; file = os.fdopen(os.dup(1), 'w'); file.write('never closed')", 0),
        ("import sys; sys.exit(259)", 3),
        ("raise KeyboardInterrupt", -2),
    ],
)
def test_it_ends_as_a_fresh_process_ends(program, text, code):
    fresh, forked = both(program(text))
    assert forked[2] == fresh[2] == code
    assert forked[0] == fresh[0]
    assert forked[1].splitlines()[-1:] == fresh[1].splitlines()[-1:]


def test_it_can_be_waited_for_and_ended(program):
    text = "import signal; print('runs', flush=True); signal.pause()"
    with forking.forked(program(text), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "runs\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait() == -signal.SIGTERM
        assert process.poll() == -signal.SIGTERM


def test_what_has_no_program_of_its_own_is_not_forked():
    with forking.popen([sys.executable, "-c", ""]) as process:
        assert not isinstance(process, forking.Forked)


def test_a_server_with_threads_starts_nothing(tmp_path):
    """Nor one that has imported what a run has a copy of."""
    code = f"import sys; sys.path.insert(0, {str(Path(forking.__file__).parent)!r}); "
    code += "import threading, fork_server; "
    for spoil in (
        "threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "sys.modules['megatron'] = sys",
    ):
        command = [sys.executable, "-c", f"{code}{spoil}; fork_server.check_fit()"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1
        assert "wants none" in done.stderr


RANKS = """
import os, sys, torch
torch.distributed.init_process_group("gloo")
rank = torch.ones(1) * torch.distributed.get_rank()
torch.distributed.all_reduce(rank)
if os.environ["RANK"] in sys.argv[1:]:
    sys.exit("of no use")
torch.distributed.barrier()
sys.stdout.write(f"{int(rank)}\\n")  # at once, where print writes twice
"""


@pytest.mark.parametrize(("broken", "code"), [((), 0), (("1",), 1)])
def test_ranks_meet_and_end_together(program, broken, code):
    command = program(RANKS, *broken)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command[1:1] = torchrun
    with forking.popen(command, stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate()
    assert process.returncode == code
    assert out == ("1\n" * 2 if code == 0 else "")


@pytest.mark.parametrize(("text", "kind"), [(TELL, forking.Forked), ("", subprocess.Popen)])
def test_a_program_without_torch_is_started_afresh(program, text, kind):
    with forking.popen(program(text), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as one:
        assert type(one) is kind
