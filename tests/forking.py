"""Starts Python programs by forking a process that has imported torch, and what goes with it.

A program is started here as subprocess.Popen starts it, and is as in a fresh process, but for the
six seconds that its imports take. `fork_server.py` says what it does not import. A program that
imports no torch is started afresh.
"""

import functools
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from json import dumps
from pathlib import Path

from mqo import process
from mqo.launch.machine import torch_cuda
from mqo.megatron.run import answer

# What these variables say is read when torch and other packages are loaded, in the server.
ENVIRONMENT = {
    **{"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"},
    **{f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL")},
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # a process with threads cannot be forked
}
OPTIONS = ("-I", "-u", "-W", "ignore")
IMPORTS_TORCH = re.compile(
    r"^\s*(?:from|import) .*\b(?:torch|megatron|mqo\.quant|pretrain_gpt)\b", re.MULTILINE
)


JOB = "mqo.sweep.job"
fresh = process.spawn


def launcher(*command):
    """The command of a launcher, a module or a script, whose programs are forked."""
    python, *words = (str(word) for word in command)
    if torch_cuda() is not None:
        return [python, *words]
    words = words[1:] if words[0] == "-m" else words
    return [python, str(Path(__file__).with_name("fork_launcher.py")), server().socket, *words]


def popen(command, **options):
    """The process of a command: forked where it is a Python program's, else fresh.

    So are the ranks of a program that torchrun would start on this machine alone, and what a job
    of a sweep starts.
    """
    words = [str(word) for word in command]
    if words[0] != sys.executable or torch_cuda() is not None:
        return fresh(words, **options)
    if words[1:3] == ["-m", JOB]:
        return fresh(launcher(*words), **options)
    if words[1:3] == ["-m", "torch.distributed.run"] and "--standalone" in words:
        count = words[words.index("--nproc-per-node") + 1]
        program = words[words.index("--standalone") + 1 :]
        ranks = str(Path(__file__).with_name("fork_ranks.py"))
        return fresh([sys.executable, ranks, server().socket, count, *program], **options)
    program = Path(words[_program(words)])
    if program == Path(answer.__file__):  # it imports what the program that it calls does
        program = Path(words[_program(words) + 1])
    return (forked if _imports_torch(program) else fresh)(words, **options)


def _imports_torch(program):
    """Whether a program loads what the server has; others are sooner there without it."""
    return program.suffix == ".py" and IMPORTS_TORCH.search(program.read_text()) is not None


def _program(words):
    """Where the program is, behind Python's options."""
    return next((n for n, word in enumerate(words[1:], 1) if word not in OPTIONS), 0)


def forked(words, **options):
    return Forked(words, start_new_session=True, **options)


def run(command, *, env=None, cwd=None, check=False):
    """What a command printed, and its exit code, as subprocess.run tells in text.

    The command is this Python with a program, or with `-c` and a text.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    start = forked if torch_cuda() is None else fresh
    words = [str(word) for word in command]
    with start(words, env=env, cwd=cwd, text=True, **pipes) as started:
        try:
            out, err = started.communicate()
        finally:
            if started.poll() is None:
                process.end(started)
    done = subprocess.CompletedProcess(command, started.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class Forked(subprocess.Popen):
    """A child of the server, which tells how it ended."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        assert preexec_fn is None and not pass_fds
        streams = rest[3:9]
        cut = _program(args)
        ignored = [s for s in signal.valid_signals() if signal.getsignal(s) is signal.SIG_IGN]
        asked = {
            "options": args[1:cut],
            "program": args[cut],
            "words": args[cut + 1 :],
            "cwd": str(cwd or Path.cwd()),
            "env": {str(k): str(v) for k, v in (os.environ if env is None else env).items()},
            "ignored": [int(s) for s in ignored],
        }
        theirs = [streams[n] if streams[n] != -1 else own for own, n in enumerate((0, 3, 5))]
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.server.connect(server().socket)
        socket.send_fds(self.server, [dumps(asked).encode()], theirs)
        answer = self.server.recv(100)
        assert answer, "the server has ended; it said why"
        self.pid, self._child_created = int(answer), True
        self._close_pipe_fds(*streams)

    def _try_wait(self, wait_flags):
        """(process id, wait status), the former 0 while it runs and nobody wants to wait."""
        if wait_flags == os.WNOHANG:
            self.server.setblocking(False)
        try:
            status = int(self.server.recv(100))
        except BlockingIOError:
            return 0, 0
        finally:
            self.server.setblocking(True)
        self.server.close()
        return self.pid, status

    def _internal_poll(self, *args, **options):
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


class Server:
    """This process's own server; the socket's folder goes with it."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="mqo-fork-")
        self.socket = str(Path(self.folder.name) / "socket")
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("fork_server.py"), self.socket],
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdout.readline() == b"ready\n"

    def stop(self):
        with self.process:
            self.process.stdin.close()
        self.folder.cleanup()


server = functools.cache(Server)


def stop():
    """End the server, if there is one."""
    if server.cache_info().currsize:
        server().stop()
        server.cache_clear()
