"""`python -m mqo.sweep.job FOLDER`: trains in FOLDER what its cell.json says.

Each run has a process of its own: the sweep goes on, whatever becomes of it.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

from mqo import process
from mqo.launch.config import RunConfig
from mqo.launch.run import run
from mqo.project import Project
from mqo.runs import RunFolder
from mqo.terminal import guarded

PARENT = "MQO_SWEEP"
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Train; exit codes are those of train_config.py."""
    with process.command():
        _end_with(os.environ.pop(PARENT, ""))
        guarded(lambda: train(RunFolder(Path(sys.argv[1]).resolve())))


def train(folder: RunFolder) -> None:
    """Train in a folder what its cell.json says."""
    config = RunConfig.read(folder)
    result = run(Project.here(), config, report=lambda text: print(text, flush=True), folder=folder)
    print(f"result   : {result.line()}")


def _end_with(parent: str) -> None:
    """Be told to end when the sweep, process `parent` of this machine, is gone, killed even."""
    if parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            sys.exit("mqo: the sweep is gone")


if __name__ == "__main__":
    main()
