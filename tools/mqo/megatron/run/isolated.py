"""Try work on a file in a forked child process first, with limits on time and memory.

A pickle or a tokenizer of a few kilobytes can take a terabyte, or a week. The child only reports
that it ended, or one sentence, so that the file cannot affect this process. Any other error counts
as an end: this process repeats the work and raises the error itself.

A fork of a process that has initialized CUDA is not safe, so `try_first` does nothing there. This
module needs only the standard library.
"""

import errno
import faulthandler
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mqo.megatron.run.errors import chain
from mqo.megatron.run.untrusted import UntrustedFileError

# The child's answers.
_ENDED, _MEMORY, _NESTED, _REFUSED, _PANIC = "ended", "memory", "nested", "refused", "panic"
_LONGEST = 4000  # bytes of an answer; a pipe takes it at once
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_NO_MEMORY = re.compile("an(?:no|')t allocate memory|not enough memory|std::bad_alloc")


@dataclass(frozen=True)
class Limits:
    """The limits of a trial: seconds of wall time, and bytes in addition to this process's."""

    seconds: float
    memory: int


def limits_of(size: int) -> Limits:
    """Return the limits for files of `size` bytes: loading takes a few times their size."""
    return Limits(seconds=20 + 5 * size / 2**20, memory=(2 << 30) + 16 * size)


def try_first(work: Callable[[], object], path: Path, limits: Limits) -> None:
    """Run `work` only in a child process, with at most half of the free memory.

    Args:
        work: the function that reads the file.
        path: the file or folder, for the error.
        limits: of the child.

    Raises:
        UntrustedFileError: the work exceeds its limits, ends its process or refuses a file.
    """
    if _has_cuda():
        return
    memory = min(limits.memory, available_memory() // 2)
    reader, writer = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    child = os.fork()
    if child == 0:
        _run(work, writer, memory, limits.seconds)
    os.close(writer)
    try:
        answer = _answer(reader, limits.seconds)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)  # without effect if it has ended
        _, status = os.waitpid(child, 0)
    if fault := _words(answer, status):
        bounds = f"{memory / 2**30:.1f} GiB of memory and {limits.seconds:.0f} s"
        raise UntrustedFileError(path, f"cannot be loaded: {fault}", f"a file that needs {bounds}")
    kind, *parts = str(answer).split("\n")
    if kind == _REFUSED:
        raise UntrustedFileError(*parts)


def available_memory() -> int:
    """Return the bytes of memory that the machine and its cgroup leave to this process."""
    free = machine_memory()
    with suppress(OSError, ValueError, StopIteration):
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    with suppress(OSError, ValueError):  # no such file, or "max"
        used, most = ((_CGROUP / f"memory.{name}").read_text() for name in ("current", "max"))
        free = min(free, max(0, int(most) - int(used)))
    return free


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or the limit of its cgroup."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no such file, or "max"
        total = min(total, int((_CGROUP / "memory.max").read_text()))
    return total


def _run(work: Callable[[], object], writer: int, memory: int, seconds: float) -> NoReturn:
    """Run the work in the child process, and never return."""
    answer = _PANIC  # a child without limits must not count as one that succeeded
    try:
        _restrict(memory, seconds)
        answer = _ENDED
        work()
    except RecursionError:
        answer = _NESTED
    except UntrustedFileError as error:
        parts = (os.fspath(error.path), error.fault, error.expected)
        answer = "\n".join((_REFUSED, *(part.replace("\n", " ") for part in parts)))
    except BaseException as error:
        # A panic in Rust is not an Exception.
        other = answer if isinstance(error, Exception) else _PANIC
        answer = _MEMORY if _lacks_memory(error) else other
    finally:
        try:
            _limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
            os.write(writer, answer.encode("utf-8", "surrogateescape")[:_LONGEST])
        finally:
            os._exit(0)  # always, because the caller's code must not run twice


def _restrict(memory: int, seconds: float) -> None:
    """Limit this process, and discard what it prints."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    sys.stdout = sys.stderr = os.fdopen(null, "w")
    faulthandler.disable()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + memory
    _limit(resource.RLIMIT_AS, most)  # removed again before the answer is written
    _limit(resource.RLIMIT_CORE, 0)
    # The child ends even if this program is killed.
    _limit(resource.RLIMIT_CPU, int(seconds) + 2)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # threads of a pool do not exist in a fork


def _limit(kind: int, most: int) -> None:
    """Set the soft limit of a resource, at most to the hard limit."""
    _, hard = resource.getrlimit(kind)
    bounds = [bound for bound in (most, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min(bounds, default=resource.RLIM_INFINITY), hard))


def _lacks_memory(error: BaseException) -> bool:
    """Return whether an error or one of its causes means that memory was refused.

    torch raises a RuntimeError, known by its message.
    """
    for cause in chain(error):
        if isinstance(cause, MemoryError) or getattr(cause, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(cause, RuntimeError) and _NO_MEMORY.search(str(cause)):
            return True
    return False


def _answer(reader: int, seconds: float) -> str | None:
    """Return the child's answer; '' if it died without one, None after the time limit."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if select.select([reader], [], [], left)[0]:
            return os.read(reader, _LONGEST).decode("utf-8", "surrogateescape")
    return None


def _words(answer: str | None, status: int) -> str | None:
    """Return a clause on the child's failure; None if it ended or refused a file."""
    if answer is None:
        return "it takes too long"
    if not answer:
        code = os.waitstatus_to_exitcode(status)
        end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"it ends the program ({end})"
    known = {_NESTED: "it is nested too deeply", _MEMORY: "it takes too much memory"}
    known[_PANIC] = "its library fails on it"
    return known.get(answer)


def _has_cuda() -> bool:
    """Return whether this process has initialized CUDA."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()
