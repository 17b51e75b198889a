"""The typed errors of `mqo`: each says what was found, what was expected, and what helps."""

import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mqo.megatron.run.errors import FULL as FULL
from mqo.megatron.run.errors import is_full as is_full
from mqo.megatron.run.errors import nearest as nearest


class MqoError(Exception):
    """A failure the user can act on; the command line prints its text as one paragraph.

    `found` and `expected` are clauses without a full stop; `help` is one sentence that names the
    command to run or the change to make. `detail`, such as a diff, is shown below the paragraph.
    """

    exit_code = 2

    def __init__(self, found: str, *, expected: str = "", help: str = "", detail: str = "") -> None:
        self.found, self.expected, self.help, self.detail = found, expected, help, detail
        parts = [found.rstrip(".") + "."]
        if expected:
            parts.append(f"Expected: {expected.rstrip('.')}.")
        if help:
            parts.append(help.rstrip(".") + ".")
        super().__init__(" ".join(parts))

    def as_table(self) -> dict[str, str]:
        """Return the error for JSON."""
        kind = type(self).__name__
        return {"type": kind, "text": str(self), "detail": self.detail}


class UnknownNameError(MqoError):
    """A name that no table holds; the text lists the valid names."""

    def __init__(self, kind: str, name: str, valid: Iterable[object], help: str = "") -> None:
        listed = ", ".join(sorted(map(str, valid)))
        text = f"There is no {kind} called '{name}'"
        super().__init__(text, expected=f"one of {listed}", help=help)


class SetupError(MqoError):
    """Something the machine lacks, or a download that failed."""


class VendorError(MqoError):
    """A wheel or checkout that is not what UPSTREAM.toml pins, or is unsafe to unpack."""


class OverlayError(MqoError):
    """The tree is not in the state that the command needs."""


class TableError(OverlayError):
    """A file that users edit, such as series.toml or a patch, that does not fit its schema."""


class DriftError(OverlayError):
    """A patch does not match this source as many times as it must."""


class EditedError(OverlayError):
    """A file of the tree was changed by hand since mqo last wrote it."""


class PluginError(MqoError):
    """A file of quantizers that cannot be used, or an invalid option of one."""


class FormatError(MqoError):
    """A file of number formats that cannot be used."""


class DataError(MqoError):
    """A dataset, tokenizer or index that is missing or cannot be made."""


class MissingError(DataError):
    """Data, a tokenizer or a teacher that does not exist; a dry run lists it."""


class LayoutError(MqoError):
    """Parallel sizes that do not divide the processes, the model or the batch."""


class RunError(MqoError):
    """A training run that failed; the text says where its log is.

    `exit_code` is that of the training process, if that failed.
    """

    def __init__(self, found: str, *, exit_code: int = MqoError.exit_code, **rest: str) -> None:
        super().__init__(found, **rest)
        self.exit_code = exit_code


class TrackerError(MqoError):
    """An experiment tracker that did not accept a run; the run itself is unchanged."""


class ConvertError(MqoError):
    """Weights that do not fit the target format, or that no format here can hold."""


class CheckpointError(MqoError):
    """A checkpoint that cannot be run, or a text, tokenizer, task or choice unfit for it."""


class DiskFullError(MqoError):
    """A full disk or quota: that of `folder`, or of an unknown folder if that is None."""

    def __init__(self, folder: Path | None) -> None:
        text = "A disk is full"
        if folder is not None:
            free = shutil.disk_usage(nearest(folder.absolute())).free
            text = f"The disk of {folder} is full: {free:,} bytes are free"
        super().__init__(
            text,
            expected="room for what is written there",
            help="Free some space (df and du show what takes it), or give a folder on another "
            "disk, and start the command again",
        )


def check_name(kind: str, name: object, valid: Collection[object]) -> None:
    """Raise UnknownNameError unless `name` is one of `valid`."""
    if name not in valid:
        raise UnknownNameError(kind, str(name), valid)


class OutputError(MqoError):
    """A path that a command does not write to."""


class FileError(MqoError):
    """A file or folder that the system does not let a command read or write."""

    def __init__(self, path: str | os.PathLike[str], error: OSError) -> None:
        super().__init__(
            f"{os.fspath(path)} cannot be used: {error.strerror or error}",
            expected="a path that this user may read, and write if the command writes it",
            help="Correct it (`ls -ld` shows its owner and mode), or give another path",
        )


@contextmanager
def full_disk_of(folder: Path) -> Iterator[None]:
    """Raise DiskFullError, which names `folder`, for any error that a full disk caused.

    The error of a write does not name the file. A typed error is raised unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, MqoError) or not is_full(error):
            raise
        raise DiskFullError(folder) from error


def one_line(error: Exception | str) -> str:
    """Return the message of an error in one line; the name of its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__
