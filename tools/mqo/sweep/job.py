"""Train the configuration in FOLDER/cell.json: `python -m mqo.sweep.job FOLDER [TRACKER]`.

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
    """Train; the exit codes are those of `mqo train`."""
    with process.command():
        _end_with(os.environ.pop(PARENT, ""))
        guarded(lambda: train(RunFolder(Path(sys.argv[1]).resolve()), *sys.argv[2:]))


def train(folder: RunFolder, tracker: str | None = None) -> None:
    """Train the configuration in the folder's cell.json, which does not include the tracker."""
    config, project = RunConfig.read(folder), Project.here()

    def say(text: str) -> None:
        print(text, flush=True)

    result = run(project, config, report=say, folder=folder, tracker=tracker)
    print(f"result   : {result.line()}")


def _end_with(parent: str) -> None:
    """Make the kernel terminate this process when the sweep, process `parent`, ends."""
    if parent:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != int(parent):
            sys.exit("mqo: the sweep has ended")


if __name__ == "__main__":
    main()
