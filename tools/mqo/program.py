"""Runs a program of a Megatron tree in a process of its own, for `mqo` itself imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mqo import process
from mqo.errors import MqoError, RunError
from mqo.project import Project

FAILURE, OUTPUT, SCRATCH = "failure.json", "stderr.txt", "tmp"


@dataclass(frozen=True)
class Program:
    """A program that runs; `folder` is for its output, and is removed with the program."""

    name: str
    process: subprocess.Popen
    folder: Path
    error: type[MqoError]
    help: str

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until it has ended well.

        Raises:
            MqoError: of type `error`, what the program wrote to the file that MQO_FAILURE names.
            RunError: any other failure, with its last words; or it took more than `limit_s`.
        """
        try:
            code = self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise RunError(f"{self.name} did not end within {limit_s} s") from None
        failure = self.folder / FAILURE
        if failure.exists():
            raise self.error(**json.loads(failure.read_text(encoding="utf-8")))
        if code != 0:
            said = (self.folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
            last = said.strip().splitlines() or ["it printed nothing"]
            raise RunError(
                f"{self.name} ended with exit code {code}: {last[-1]}",
                help=self.help,
                detail=said[-4000:],
            )


@contextmanager
def started(
    program: Path,
    words: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    error: type[MqoError] = RunError,
    help: str = "",
) -> Iterator[Program]:
    """Start a program without this environment's Python path and without a run's variables.

    Whatever ends the block ends the program, and removes what it left in the temporary folder.
    """
    # A run's options are none of this one's; everything that is read is on disk.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MQO_")}
    with process.temporary_folder("mqo-program-") as folder:
        (folder / SCRATCH).mkdir()
        own = {"HF_HUB_OFFLINE": "1", "MQO_FAILURE": str(folder / FAILURE)}
        own |= Project.here().compiled()
        own["TMPDIR"] = str(folder / SCRATCH)
        with (
            (folder / OUTPUT).open("wb") as output,
            process.started(
                [sys.executable, "-I", "-W", "ignore", str(program), *words],
                env=kept | own | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
            ) as running,
        ):
            name = f"{program.parent.name}/{program.name}"
            yield Program(name, running, folder, error, help)


def run_program(
    program: Path,
    words: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    error: type[MqoError] = RunError,
    help: str = "",
    limit_s: float | None = None,
) -> None:
    """Run a program to its end; `started` and `Program.wait` say how, and what they raise."""
    with started(program, words, variables=variables, error=error, help=help) as running:
        running.wait(limit_s)
