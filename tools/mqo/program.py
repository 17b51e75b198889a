"""Run a program of a Megatron tree in its own process: `mqo` itself does not import torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mqo import process
from mqo.errors import MqoError, RunError
from mqo.megatron.run import answer
from mqo.project import Project

FAILURE, PROGRESS, ANSWER = "failure.json", "progress.json", "answer.json"
OUTPUT, SCRATCH = "stderr.txt", "tmp"
POLL_S = 0.2
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")


class Advance(NamedTuple):
    """The progress that a program reports: `what` is the unit, or the current stage."""

    what: str
    done: int
    total: int


Watch = Callable[[Advance], None]
T = TypeVar("T")
R = TypeVar("R")


class _Thread(threading.local):
    """What a thread of `at_once` watches: whether the programs of all threads are to end."""

    stopped = threading.Event()  # never set


_thread = _Thread()


def ask(
    program: Path,
    words: Sequence[str],
    *,
    name: str = "",
    variables: Mapping[str, str] | None = None,
    error: type[MqoError] = RunError,
    help: str = "",
    limit_s: float | None = None,
    watch: Watch = lambda advance: None,
) -> Any:
    """Return the JSON that a program writes to the file that its last word names, after `words`.

    It runs without this environment's Python path and without a run's variables. `watch` gets its
    progress now and then. `name` is for errors, by default that of the file.

    Raises:
        MqoError: of type `error`, as the program wrote it to the file that MQO_FAILURE names.
        RunError: any other failure, with its last line; or it took more than `limit_s`, or wrote no
            result.
    """
    name = name or _name(program)
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
                [sys.executable, "-I", "-W", "ignore", str(program), *words, str(folder / ANSWER)],
                env=kept | own | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=output,
            ) as running,
        ):
            code = _exit_code(running, name, folder / PROGRESS, limit_s, watch)
        if (folder / FAILURE).exists():
            raise error(**json.loads((folder / FAILURE).read_text(encoding="utf-8")))
        if code != 0:
            text = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
            last = text.strip().splitlines() or ["it printed nothing"]
            fault = f"{name} ended with exit code {code}: {last[-1]}"
            raise RunError(fault, help=help, detail=text[-4000:])
        if not (folder / ANSWER).is_file():  # upstream exits with code 0 after some errors
            raise RunError(f"{name} ended without a result")
        return json.loads((folder / ANSWER).read_text(encoding="utf-8"))


def _exit_code(
    running: subprocess.Popen, name: str, progress: Path, limit_s: float | None, watch: Watch
) -> int:
    started = time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return running.wait(POLL_S)
        with suppress(OSError, ValueError):  # not yet written, or only half
            watch(Advance(**json.loads(progress.read_text(encoding="utf-8"))))
        if limit_s is not None and time.monotonic() - started > limit_s:
            raise RunError(f"{name} did not end within {limit_s} s")
        if _thread.stopped.is_set():
            raise RunError(f"{name} was ended")


def _name(program: Path) -> str:
    return f"{program.parent.name}/{program.name}"


def call(program: Path, function: str, request: Mapping[str, Any], **options: Any) -> Any:
    """Return what a function of a program returns; `request` are its arguments by name.

    `options` are those of `ask`, which says what is raised.
    """
    with process.temporary_folder("mqo-request-") as folder:
        file = folder / "request.json"
        file.write_text(json.dumps(request, default=str), encoding="utf-8")
        words = [str(program), function, str(file)]
        return ask(Path(answer.__file__), words, name=_name(program), **options)


def at_once(work: Callable[[T], R], items: Iterable[T], threads: int) -> list[R]:
    """Return `work` of each item, computed in threads that each run a program.

    A stop signal, and an error in one thread, end the programs of all.
    """
    from concurrent.futures import ThreadPoolExecutor  # takes time to load

    stopped = threading.Event()

    def begin() -> None:
        _thread.stopped = stopped

    with ThreadPoolExecutor(threads, initializer=begin) as pool:
        try:
            return list(pool.map(work, items))
        except BaseException:
            stopped.set()
            raise
