"""`python -m mqo.sweep.job FOLDER [TRACKER]`: trains in FOLDER what its cell.json says.

Each run has its own process, so that the sweep continues if a run fails.
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
        guarded(lambda: train(RunFolder(Path(sys.argv[1]).resolve()), *sys.argv[2:]))


def train(folder: RunFolder, tracker: str | None = None) -> None:
    """Train in a folder what its cell.json says, which does not name the tracker."""
    config, project = RunConfig.read(folder), Project.here()

    def say(text: str) -> None:
        print(text, flush=True)

    result = run(project, config, report=say, folder=folder, tracker=tracker)
    print(f"result   : {result.line()}")


def _end_with(parent: str) -> None:
    """Be told to end when the sweep, process `parent` of this machine, is gone, killed even."""
    if parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            sys.exit("mqo: the sweep is gone")


if __name__ == "__main__":
    main()
