"""Run a program of a Megatron tree in its own process: `mqo` itself does not import torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mqo import process
from mqo.errors import MqoError, RunError
from mqo.project import Project

FAILURE, PROGRESS, OUTPUT, SCRATCH = "failure.json", "progress.json", "stderr.txt", "tmp"
POLL_S = 0.2
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")


class Advance(NamedTuple):
    """The progress that a program reports: `what` is the unit, or the current stage."""

    what: str
    done: int
    total: int


Watch = Callable[[Advance], None]


@dataclass(frozen=True)
class Program:
    """A running program; `folder` holds its output, and is removed when it ends."""

    name: str
    process: subprocess.Popen
    folder: Path
    error: type[MqoError]
    help: str

    def wait(self, limit_s: float | None = None, watch: Watch = lambda advance: None) -> None:
        """Wait until it has succeeded; `watch` gets its progress now and then.

        Raises:
            MqoError: of type `error`, as the program wrote it to the file that MQO_FAILURE names.
            RunError: any other failure, with its last line; or it took more than `limit_s`.
        """
        code = self._exit_code(limit_s, watch)
        failure = self.folder / FAILURE
        if failure.exists():
            raise self.error(**json.loads(failure.read_text(encoding="utf-8")))
        if code != 0:
            output = (self.folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
            last = output.strip().splitlines() or ["it printed nothing"]
            raise RunError(
                f"{self.name} ended with exit code {code}: {last[-1]}",
                help=self.help,
                detail=output[-4000:],
            )

    def _exit_code(self, limit_s: float | None, watch: Watch) -> int:
        started = time.monotonic()
        while True:
            with suppress(subprocess.TimeoutExpired):
                return self.process.wait(POLL_S)
            with suppress(OSError, ValueError):  # not yet written, or only half
                watch(Advance(**json.loads((self.folder / PROGRESS).read_text(encoding="utf-8"))))
            if limit_s is not None and time.monotonic() - started > limit_s:
                raise RunError(f"{self.name} did not end within {limit_s} s")


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

    The end of the block ends the program and removes its temporary files.
    """
    # MQO_ variables configure a run, not this program, which reads everything from disk.
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MQO_")}
    with process.temporary_folder("mqo-program-") as folder:
        (folder / SCRATCH).mkdir()
        own = dict.fromkeys(OFFLINE, "1") | {"MQO_FAILURE": str(folder / FAILURE)}
        own |= {"MQO_PROGRESS": str(folder / PROGRESS), **Project.here().compiled()}
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
    limit_s: float | None = None,
    watch: Watch = lambda advance: None,
    **options: Any,
) -> None:
    """Run a program to its end; see `started` and `Program.wait` for options and errors."""
    with started(program, words, **options) as running:
        running.wait(limit_s, watch)


def ask(
    program: Path, words: Sequence[str], *, after: Sequence[str] = (), **options: Any
) -> dict[str, Any]:
    """Return the JSON that a program writes to the file named between `words` and `after`.

    `options` are those of `run_program`. Raise what it raises, and RunError without a result.
    """
    with process.temporary_folder("mqo-facts-") as folder:
        target = folder / "facts.json"
        run_program(program, [*words, str(target), *after], **options)
        if not target.is_file():  # upstream exits with code 0 after some errors
            raise RunError(f"{program.parent.name}/{program.name} ended without a result")
        return json.loads(target.read_text(encoding="utf-8"))
