"""A process that has imported everything, and forks off one that runs `mqo` for each line it reads.

A line is a JSON object: {"start": words, ...} is answered with the new process's id, {"wait": id}
with its exit status, negative for a signal. What the process prints goes to the files PREFIX.out
and PREFIX.err, and every step it reaches, with the
time, to PREFIX.steps.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from mqo import cli
from mqo.overlay import transaction, tree
from mqo.project import Project

MODULES = ["apply", "vendor", "snapshot", "patch_files", "status", "diff", "rewrite"]


class MiniProject(Project):
    """As the one in tests/mqo/conftest.py."""

    ours = tree = property(lambda self: self.root / "tree")
    upstream_pin = property(lambda self: self.root / "Megatron-LM/UPSTREAM.toml")


def step_of(job, steps):
    """A `transaction.step` that writes down where it is, and at one place kills its process, or
    waits there while a file exists.
    """
    at, number = job.get("at", ["", 0])
    seen = 0

    def step(name):
        nonlocal seen
        os.write(steps, f"{name} {time.monotonic()}\n".encode())
        seen += name == at
        if name == at and seen == number:
            if "hold" not in job:
                os.kill(os.getpid(), signal.SIGKILL)
            while Path(job["hold"]).exists():
                time.sleep(0.01)

    return step


def run(job):
    prefix = job["prefix"]
    flags = os.O_WRONLY | os.O_APPEND
    for number, ending in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{prefix}.{ending}", flags), number)
    transaction.step = step_of(job, os.open(f"{prefix}.steps", flags))
    tree.LOCK_WAIT_S = job.get("lock_wait_s", tree.LOCK_WAIT_S)
    project = MiniProject(Path(job["project"]))
    Project.here = classmethod(lambda cls: project)
    sys.argv = ["mqo", *job["start"]]
    code = 1
    try:
        cli.main()
    except SystemExit as left:
        code = left.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    os.fsync = lambda handle: None  # it helps against power cuts alone, and disks are slow
    for name in MODULES:
        importlib.import_module(f"mqo.overlay.{name}")
    importlib.import_module("filelock")
    for line in sys.stdin:
        job = json.loads(line)
        if "start" in job:
            answer = os.fork()
            if answer == 0:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                run(job)
        else:
            _, status = os.waitpid(job["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        print(answer, flush=True)


main()
