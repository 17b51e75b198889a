"""Lock CHECKPOINT: only one run at a time saves in a folder.

The file mqo.lock in the folder names the run, which holds the folder as long as the file names it.
Each change of the file is made under flock, which is held for milliseconds: the nodes of a run
cannot share a flock, and not all disks have it. A run removes the file when it ends; the next run
takes over the file of a killed one (see `lock_holder`).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path

from mqo.display import Say
from mqo.errors import FileError, RunError, full_disk_of
from mqo.launch.config import Cluster
from mqo.launch.lock_holder import STALE_S, Holder, Host, LockRecord, Process, RunIdentity
from mqo.process import held
from mqo.untrusted import Limit, read_bytes

FILE = "mqo.lock"
BEAT_S = 20  # between two heartbeats
ORPHAN_S = 60  # how long to wait for the training of a killed launcher, which ends when it prints
FLOCK_S = 30
_POLL_S = 0.1
_NO_FLOCK = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
_MOST_BYTES = 1 << 20


class LockLostError(RunError):
    """Another run took the lock of this one."""


class CheckpointLock:
    """The lock of one launcher on one folder; `locked` creates it."""

    def __init__(self, folder: Path, run: Path, where: Cluster, report: Say) -> None:
        self.folder, self.path, self.report = folder, folder / FILE, report
        self.job = RunIdentity.from_cluster(where)
        self.node, self.here = where.node_rank, Host.here()
        self.run = run
        self.processes: tuple[Process, ...] = (Process.running(os.getpid()),)
        self.beaten = -inf
        self._made = self._told = False

    def acquire(self, *, take: bool = False) -> None:
        """Take the lock; with `take`, even from a run that seems to hold it.

        Raises:
            RunError: another run holds it.
        """
        self._made = not self.folder.exists()
        with full_disk_of(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            start = time.monotonic()
            while (orphan := self._try(take)) is not None:
                if time.monotonic() - start > ORPHAN_S:
                    raise _refused(self.folder, orphan, self.here)
                time.sleep(_POLL_S)

    def add(self, pid: int) -> None:
        """Record the training process at the next beat: it may outlive a killed launcher."""
        with suppress(ProcessLookupError):  # it has ended
            self.processes = (*self.processes[:1], Process.running(pid))
        self.beaten = -inf

    def beat(self) -> None:
        """Write a heartbeat if the last one is old.

        Raises:
            LockLostError: another run took the lock.
        """
        if time.monotonic() - self.beaten < BEAT_S:
            return
        self.beaten = time.monotonic()
        with suppress(OSError, FileError), self._opened() as file:  # a failed disk may recover
            record = _read(file)
            if isinstance(record, LockRecord) and not self._holds(record):
                raise LockLostError(
                    f"Another run took the lock on {self.folder}: "
                    f"{record.holders[0].described(self.here, time.time())}",
                    expected="one run at a time in a CHECKPOINT",
                    help="This run was stopped without saving; give it a CHECKPOINT of its own",
                )
            self._write(file, record)

    def release(self) -> None:
        """Release the folder; the last node of a run removes the file."""
        with suppress(OSError, FileError, RunError), held():
            if self.path.exists():
                self._leave()
            if self._made:
                self.folder.rmdir()  # if nothing was saved

    def _leave(self) -> None:
        with self._opened() as file:
            record = _read(file)
            if not isinstance(record, LockRecord) or not self._holds(record):
                return
            if others := record.fellows(self.job, self.node):
                _replace(file, LockRecord(job=record.job, holders=others))
            else:
                self.path.unlink()

    def _try(self, take: bool) -> Holder | None:
        """Take the lock; return the holder to wait for, if one is about to end.

        Raises:
            RunError: another run holds it.
        """
        with self._opened() as file:
            record, now = _read(file), time.time()
            if isinstance(record, float) and now - record < STALE_S and not take:
                raise _unreadable(self.path)
            rivals = record.rivals(self.job, self.node) if isinstance(record, LockRecord) else ()
            states = {} if take else {h.state(self.here, now): h for h in rivals}
            if "live" in states:
                raise _refused(self.folder, states["live"], self.here)
            if "orphan" in states:
                self._tell_of(states["orphan"])
                return states["orphan"]
            self._write(file, record)
        self.beaten = time.monotonic()
        return None

    def _tell_of(self, orphan: Holder) -> None:
        if not self._told:
            self.report(f"waiting  : for {orphan.described(self.here, time.time())} to end")
        self._told = True

    def _holds(self, record: LockRecord) -> bool:
        return record.held_by(self.processes[0], self.here)

    def _write(self, file: int, record: LockRecord | float | None) -> None:
        """Replace `record` by this holder and those of the other nodes of the same run."""
        own = Holder(
            node=self.node,
            run=self.run,
            host=self.here,
            processes=self.processes,
            heartbeat=round(time.time()),
        )
        others = record.fellows(self.job, self.node) if isinstance(record, LockRecord) else ()
        _replace(file, LockRecord(job=self.job, holders=(*others, own)))

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Yield the file, created if needed, while no other process changes it."""
        while True:
            file = _open(self.path)
            try:
                self._flock(file)
                if not _is_at(self.path, file):
                    continue  # a run that ended has removed it
                try:
                    yield file
                finally:
                    _remove_empty(self.path, file)
                return
            finally:
                os.close(file)

    def _flock(self, file: int) -> None:
        start = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() - start > FLOCK_S:
                    raise RunError(
                        f"{self.path} was locked by another process for {FLOCK_S} s",
                        expected="commands that lock it for less than a second",
                        help=f"`fuser {self.path}` shows which process has it open",
                    ) from None
                time.sleep(_POLL_S)
            except OSError as error:
                if error.errno not in _NO_FLOCK:
                    raise
                if not self._told:
                    self.report(
                        f"note     : the disk of {self.folder} has no locks ({error.strerror}): "
                        "do not start two runs there in the same second"
                    )
                self._told = True
                return


@contextmanager
def locked(
    folder: Path | None, run: Path, where: Cluster, report: Say, *, take: bool = False
) -> Iterator[CheckpointLock | None]:
    """Lock the folder that a run saves in until the block ends; None if it saves nothing."""
    if folder is None:
        yield None
        return
    lock = CheckpointLock(folder, run, where, report)
    try:
        lock.acquire(take=take)
        yield lock
    finally:
        lock.release()


def check_free(folder: Path | None, where: Cluster) -> None:
    """Raise RunError if a run would be refused now; change nothing."""
    record = record_in(folder) if folder else None
    if folder is None or record is None:
        return
    here, job = Host.here(), RunIdentity.from_cluster(where)
    for holder in record.rivals(job, where.node_rank):
        if holder.state(here, time.time()) == "live":
            raise _refused(folder, holder, here)


def record_in(folder: Path) -> LockRecord | None:
    """Return the record in a folder; None if there is none, or for a damaged one."""
    if not (folder / FILE).is_file():
        return None
    try:
        return LockRecord.parse(read_bytes(folder / FILE, Limit.SETTINGS))
    except (OSError, ValueError):  # a run itself checks it again
        return None


def _refused(folder: Path, holder: Holder, here: Host) -> RunError:
    help = "Wait for it to end, or give this run another CHECKPOINT"
    if holder.host != here:
        help += (
            f". If you know that it is gone, pass --take-lock; {STALE_S // 60} minutes after its "
            "last heartbeat no option is needed"
        )
    return RunError(
        f"{folder} is in use by {holder.described(here, time.time())}",
        expected="one run at a time in a CHECKPOINT",
        help=help,
    )


def _unreadable(path: Path) -> RunError:
    return RunError(
        f"{path} is damaged, and was written less than {STALE_S // 60} minutes ago",
        expected="a file that names the run that saves there, or no file",
        help="If no run saves there, remove the file or pass --take-lock",
    )


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = "symbolic link"
        raise FileError(path, error) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileError(path, OSError(errno.EINVAL, "not a regular file"))
    return file


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _remove_empty(path: Path, file: int) -> None:
    """Remove the file if nothing was written: a refused or failed command leaves none."""
    if os.fstat(file).st_size == 0 and _is_at(path, file):
        path.unlink(missing_ok=True)


def _read(file: int) -> LockRecord | float | None:
    """Return the record; None if the file is empty, or its modification time if it is damaged."""
    content = os.pread(file, _MOST_BYTES, 0)
    if not content:
        return None
    try:
        return LockRecord.parse(content)
    except ValueError:
        return os.fstat(file).st_mtime


def _replace(file: int, record: LockRecord) -> None:
    """Write the record in place. A kill can leave the end of a longer one, which readers ignore."""
    content = (record.model_dump_json(indent=1) + "\n").encode()
    os.pwrite(file, content, 0)
    os.ftruncate(file, len(content))
    os.fsync(file)
