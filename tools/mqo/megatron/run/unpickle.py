"""Read the pickles in a checkpoint without running code that they name.

`.metadata` has the position of each tensor. torch reads it with plain pickle; `protect` replaces
that by the reader in this module. `torch.load` reads everything else; `protect` restricts it to
weights and to classes that are registered as safe (`megatron/core/safe_globals.py` and, for its own
state, ModelOpt).
"""

import enum
import functools
import io
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import torch
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, filesystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from mqo.megatron.run.isolated import limits_of, try_first
from mqo.megatron.run.shards import bound_constructors, entry_fault, mark_tensors
from mqo.megatron.run.untrusted import (
    Limit,
    NoFileError,
    UntrustedFileError,
    check_file,
    list_folder,
    open_file,
)

METADATA = ".metadata"
FORMAT_FILE = "metadata.json"  # with which Megatron marks a sharded checkpoint
WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
NOT_WEIGHTS_ONLY = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"

# Words in torch's messages that advise to load without the restriction, or to widen it.
_ADVICE = re.compile(r"weights_only|safe_globals|skip_data", re.IGNORECASE)
_load_bytes = DefaultLoadPlanner.load_bytes
_slice_file = filesystem.FileSystemReader._slice_file

# The names that torch and Megatron write to `.metadata`.
_KNOWN = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata", "StorageMeta"),
        *("Metadata", "MetadataIndex", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.planner": {
        *("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    },
}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be loaded, or a folder has none to resume from."""


class ForeignError(Exception):
    """A name that does not belong in a checkpoint's metadata."""


class Reader(pickle._Unpickler):
    """Unpickle torch's own records, and nothing else; `known` names them by module.

    This is Python's reader, because the C reader sets attributes of classes, and allocates the
    sizes that a damaged file states.
    """

    known: ClassVar[dict[str, set[str]]] = _KNOWN
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that the pickle names; ForeignError for an unknown name."""
        if name in self.known.get(module, ()) or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise ForeignError(f"{module}.{name}")

    # An attribute of Python's pickle class that type stubs omit.
    stack: list[Any]

    def load_build(self) -> None:
        """Set attributes of a record only: attributes of a class would change the program."""
        kind = type(self.stack[-2])
        if kind.__module__ not in self.known or issubclass(kind, enum.Enum):
            raise ForeignError(f"setattr on {self.stack[-2]!r:.80}")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


def protect() -> None:
    """Make torch read checkpoints without running code that they name, in this process.

    Processes that this one starts inherit the restriction to weights.
    """
    os.environ.pop(NOT_WEIGHTS_ONLY, None)
    os.environ[WEIGHTS_ONLY] = "1"
    reader = SimpleNamespace(**vars(pickle) | {"load": read_metadata})
    filesystem.pickle = reader  # type: ignore[assignment]
    DefaultLoadPlanner.load_bytes = _load_checked_bytes  # type: ignore[assignment, method-assign]
    read = filesystem.FileSystemReader
    read._slice_file = _checked_slice  # type: ignore[assignment, method-assign]
    bound_constructors()


@contextmanager
def typed_errors() -> Iterator[None]:
    """Raise CheckpointError for an error of torch's loader."""
    try:
        yield
    except CheckpointException as error:
        raise _collected(error) from None
    except Exception as error:
        if refusal := explain(error):
            raise refusal from None  # torch's own message is not shown
        raise


def explain(error: BaseException) -> CheckpointError | None:
    """Return an error that names the refused file or entry; None for other errors.

    The error of torch's sharded loader contains tracebacks, and that of a restricted load advises
    to run the code that the file names.
    """
    if isinstance(error, CheckpointException):
        parts = [failure for failure, _ in error.failures.values()]
        return _collected(error) if any(map(_refused, parts)) else None
    return _refused(error)


def _refused(error: BaseException) -> CheckpointError | None:
    """Return the refusal that an error is or follows from; None for other errors."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CheckpointError):
            return cause
        if isinstance(cause, pickle.UnpicklingError) or _ADVICE.search(str(cause)):
            return _refusal("The checkpoint", _wanted(cause))
        cause = cause.__cause__ or cause.__context__
    return None


def _collected(error: CheckpointException) -> CheckpointError:
    text = "; ".join(_message(failure) for failure, _ in error.failures.values())
    return CheckpointError(" ".join(text.split()))


def _message(error: BaseException) -> str:
    """Return the message of a refusal unchanged, and of another error with its type."""
    if refused := _refused(error):
        return str(refused)
    return f"The checkpoint cannot be read: {type(error).__name__}: {error}".removesuffix(": ")


def _load_checked_bytes(planner: DefaultLoadPlanner, item: ReadItem, value: io.BytesIO) -> None:
    """Load an entry that is not a tensor."""
    try:
        _load_bytes(planner, item, value)
    except Exception as error:
        if _refused(error) is None:
            raise
        entry = f"The entry {item.storage_index.fqn} of the checkpoint"
        raise _refusal(entry, _wanted(error)) from None


def _checked_slice(reader: Any, file: io.BufferedReader, info: Any) -> Any:
    """Return an entry of a shard for torch.load, once it is checked."""
    if fault := entry_fault(file, info):
        raise _refusal(file.name, fault)
    return _slice_file(reader, file, info)


def _wanted(error: BaseException) -> str:
    """Return a clause on the reason why a restricted load refused."""
    name = re.search(r"GLOBAL (\S+)", str(error))
    return f"would run {name[1]}, which no checkpoint needs" if name else "is damaged"


def once_per_content(check: Callable[[Path], None]) -> Callable[[Path], None]:
    """Skip a check of a folder that passed in this process and has not changed since.

    The choice, the arguments and the weights of a checkpoint each need the same checks.
    """
    passed: dict[Path, tuple[object, ...]] = {}

    @functools.wraps(check)
    def checked(checkpoint: Path) -> None:
        before = _state_of(checkpoint)
        if before is None or passed.get(checkpoint) != before:
            check(checkpoint)
        if before is not None:
            passed[checkpoint] = before

    return checked


def _state_of(folder: Path) -> tuple[object, ...] | None:
    """Return name, size and times of each file in a folder, links followed; None on an error."""
    try:
        entries = [(entry.name, entry.stat()) for entry in os.scandir(folder)]
    except (OSError, UnicodeError):
        return None
    rows = ((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in entries)
    return tuple(sorted(rows))


@once_per_content
def check_metadata(checkpoint: Path) -> None:
    """Read the `.metadata` of a checkpoint's folder, if there is one.

    Raises:
        CheckpointError: the file cannot be read, or would run code.
    """
    path = checkpoint / METADATA
    if not checkpoint.is_dir():
        return
    try:
        for part in list_folder(checkpoint):
            if not part.is_dir():
                check_file(part)  # also other files, which torch opens unchecked
        with open_file(path, Limit.TEXT, within=checkpoint) as file:
            limits = limits_of(os.fstat(file.fileno()).st_size)
            try_first(lambda: read_metadata(file), path, limits)
            file.seek(0)
            read_metadata(file)
    except NoFileError:
        return
    except UntrustedFileError as error:
        raise _refusal(error.path, error.fault) from error


def tensor_names(checkpoint: Path) -> list[str]:
    """Return the names in the `.metadata` of a checkpoint's folder.

    Raises:
        CheckpointError: the file cannot be read, or would run code.
    """
    try:
        with open_file(checkpoint / METADATA, Limit.TEXT, within=checkpoint) as file:
            return list(read_metadata(file).state_dict_metadata)
    except UntrustedFileError as error:
        raise _refusal(error.path, error.fault) from error


@once_per_content
def check_common_state(checkpoint: Path) -> None:
    """Load the entries of an iteration's folder that are not tensors, in a child process.

    Raises:
        CheckpointError: loading exceeds the limits, or ends the child process.
    """
    from megatron.core.dist_checkpointing import load_common_state_dict

    if not (checkpoint / FORMAT_FILE).is_file():
        return  # one file per rank, as torch.save writes it

    def load() -> None:
        with typed_errors():  # torch's own exception does not derive from Exception
            load_common_state_dict(str(checkpoint))

    try:
        try_first(load, checkpoint, limits_of(0))
    except UntrustedFileError as error:
        raise _refusal(error.path, error.fault) from error


def read_metadata(file: BinaryIO) -> Metadata:
    """Return the content of a `.metadata` file. Only constructors of torch's own records run.

    Raises:
        CheckpointError: the file holds something else, or is damaged.
    """
    path = getattr(file, "name", METADATA)
    metadata = check_pickle(Reader(io.BytesIO(file.read())), path)
    if not isinstance(metadata, Metadata):
        raise _refusal(path, f"holds a {type(metadata).__name__}")
    try:
        mark_tensors(metadata)
    except (AttributeError, TypeError) as error:  # a value where a record should be
        raise _refusal(path, f"is damaged ({type(error).__name__}: {error})") from error
    for entry in (metadata.storage_data or {}).values():
        name = getattr(entry, "relative_path", "")
        if Path(name).name != name or name == "..":
            raise _refusal(path, f"names the file {name}, outside of the checkpoint")
    return metadata


def check_pickle(reader: Reader, path: Any) -> Any:
    """Return what `reader` builds; CheckpointError if `path` is damaged or has unknown names."""
    try:
        return reader.load()
    except ForeignError as foreign:
        raise _refusal(path, f"would run {foreign}, which no checkpoint needs") from foreign
    except Exception as error:  # a damaged pickle raises anything
        raise _refusal(path, f"is damaged ({type(error).__name__}: {error})") from error


def _refusal(path: Any, fault: str) -> CheckpointError:
    return CheckpointError(
        f"{path} {fault}. Expected: content that torch and Megatron write. Do not load this "
        "checkpoint; give another one"
    )


def _member(kind: Any, name: str, *default: Any) -> enum.Enum:
    """Return a member of an enumeration: Python 3.11.2 pickles it with getattr."""
    if not default and isinstance(kind, enum.EnumMeta) and name in kind.__members__:
        return kind[name]
    raise ForeignError("builtins.getattr")


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


# Every reader of checkpoints imports this module first.
protect()
