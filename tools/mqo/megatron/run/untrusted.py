"""Open untrusted files: checkpoints, models, tokenizers, run folders, settings.

A file is opened only if it is a regular file of a bounded size with a UTF-8 name. Pipes, devices,
sockets and folders are refused without waiting for them. With `within`, a symbolic link must end
inside that folder, or in the `blobs` of a Hugging Face cache if the folder is one of its snapshots.
Every failure is an UntrustedFileError, which names the file, what was found and what was expected.

This module needs only the standard library, so that `mqo` loads it without torch. The few other
modules that may open a file are listed in tests/test_untrusted_files.py.
"""

import hashlib
import io
import json
import math
import os
import re
import shutil
import stat
import struct
import tomllib
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

METADATA = "__metadata__"  # a key of a safetensors header, next to the tensors
# Bits of a value of safetensors, by dtype.
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8}
BITS |= {"F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32}
BITS |= {"U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}
MOST_NESTED = 100  # levels of lists and tables
MOST_NODES = 100_000  # in YAML, with aliases expanded
MOST_ENTRIES = 1_000_000  # in a folder and the folders below it
MOST_LINE = 16 << 20  # bytes of a line
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_NAME_ON_DISK = 4096  # bytes of a path
_QUOTED = re.compile(r"""\"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+\"|'[^'\n]*+'""")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
# A dotted key of TOML: the memory of tomllib is quadratic in the number of its parts.
_LONG_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{MOST_NESTED}}}")


class Limit(IntEnum):
    """Maximum file sizes in bytes, by purpose."""

    NAME = 1 << 12  # a tracker, a stamp, a note of one line
    SETTINGS = 4 << 20  # TOML and YAML that people write; scripts
    RECORD = 64 << 20  # JSON of a run, a model or a checkpoint
    HEADER = 100_000_000  # of a safetensors file: the limit of that library
    TOKENIZER = 256 << 20
    TEXT = 1 << 30  # a text or a pickle that is read whole
    STREAM = 1 << 62  # weights, indices and logs, which are read in parts


AnyPath = str | os.PathLike[str]


class UntrustedFileError(ValueError):
    """A file that is not opened, or has the wrong content.

    `fault` is a clause without its subject, such as "is not a file"; `found` begins with the path.
    None has a full stop.
    """

    def __init__(self, path: AnyPath, fault: str, expected: str) -> None:
        self.path = Path(path)
        self.fault, self.found, self.expected = fault, f"{shown(path)} {fault}", expected
        super().__init__(f"{self.found}; expected {expected}")


class NoFileError(UntrustedFileError):
    """A file that does not exist."""


def shown(path: AnyPath) -> str:
    """Return a path as printable text, with control characters and non-UTF-8 bytes escaped."""
    text = os.fspath(path).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# -- files -----------------------------------------------------------------------------------------


def open_file(
    path: AnyPath, limit: int = Limit.RECORD, *, within: Path | None = None, any_name: bool = False
) -> "io.BufferedReader[Any]":
    """Open a regular file of at most `limit` bytes for reading.

    `within` is the folder that a symbolic link must not leave. With `any_name` the name need not
    be UTF-8: a source tree may have such files.

    Raises:
        UntrustedFileError: the file is missing, not a regular file, too large or cannot be opened.
    """
    if not any_name:
        check_name(path)
    expected = f"a regular file of at most {limit:,} bytes"
    if limit == Limit.STREAM:
        expected = "a regular file"
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
    try:
        target = os.path.realpath(path, strict=True) if within else path
        if within:
            _check_inside(path, str(target), within)
            flags |= os.O_NOFOLLOW
        _check_kind(path, Path(target).stat(), expected)  # opening a device may have effects
        handle = os.open(target, flags)
    except (FileNotFoundError, NotADirectoryError):
        raise NoFileError(path, "cannot be read: it does not exist", expected) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise UntrustedFileError(path, _words(error), expected) from None
    raw = io.FileIO(os.fspath(path), "rb", opener=lambda name, mode: handle)  # keeps the name
    file = io.BufferedReader(raw)
    try:
        status = os.fstat(handle)
        _check_kind(path, status, expected)
        if status.st_size > limit:
            raise UntrustedFileError(path, f"has {status.st_size:,} bytes", expected)
    except BaseException:
        file.close()
        raise
    return file


def check_file(path: AnyPath, limit: int = Limit.STREAM, *, within: Path | None = None) -> None:
    """Raise UntrustedFileError unless `open_file` would open the file."""
    open_file(path, limit, within=within).close()


def check_name(path: AnyPath) -> None:
    """Raise UntrustedFileError for a name that is not UTF-8 or not valid for a file."""
    text = os.fspath(path)
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise UntrustedFileError(path, "is not a name in UTF-8", "a name in UTF-8") from None
    if "\0" in text:
        raise UntrustedFileError(path, "contains a NUL byte in its name", "the name of a file")
    if size > _NAME_ON_DISK:
        short = text[:80]
        raise UntrustedFileError(f"{short}...", f"is a name of {size:,} bytes", "a shorter name")


def _check_inside(path: AnyPath, target: str, within: Path) -> None:
    """Raise UntrustedFileError if a file is outside of a folder and of its cache."""
    folder = Path(os.path.realpath(within, strict=True))
    allowed = [folder]
    if folder.parent.name == "snapshots":
        allowed.append(folder.parent.parent / "blobs")
    if not any(Path(target).is_relative_to(parent) for parent in allowed):
        raise UntrustedFileError(
            path,
            f"is a link to {shown(target)}, outside of its folder",
            f"a file in {shown(within)}, or a link to one",
        )


def _check_kind(path: AnyPath, status: os.stat_result, expected: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "not a file")
        raise UntrustedFileError(path, f"is {kind}", expected)


def _words(error: OSError | RuntimeError) -> str:
    """Return the clause for an error of the operating system."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return f"cannot be read: {text}"


def read_bytes(
    path: AnyPath, limit: int = Limit.RECORD, *, within: Path | None = None, any_name: bool = False
) -> bytes:
    """Return the content of a file; the arguments are those of `open_file`."""
    with open_file(path, limit, within=within, any_name=any_name) as file:
        try:
            content = file.read(limit + 1)  # some system files report a size of 0
        except OSError as error:
            raise UntrustedFileError(path, _words(error), "a file that can be read") from None
    if len(content) > limit:
        raise UntrustedFileError(path, "grows while it is read", f"at most {limit:,} bytes")
    return content


def read_text(
    path: AnyPath,
    limit: int = Limit.SETTINGS,
    *,
    within: Path | None = None,
    errors: str = "strict",
) -> str:
    """Return the text of a UTF-8 file, with line breaks as "\\n"; `errors` is for bytes.decode."""
    content = read_bytes(path, limit, within=within)
    try:
        text = content.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise UntrustedFileError(path, f"cannot be read: {error}", "text in UTF-8") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_lines(path: AnyPath, start: int = 0) -> Iterator[bytes]:
    """Yield the lines of a file of any size from byte `start`; the last may be incomplete."""
    with open_file(path, Limit.STREAM) as file:
        file.seek(start)
        while line := file.readline(MOST_LINE):
            if len(line) == MOST_LINE and not line.endswith(b"\n"):
                raise UntrustedFileError(
                    path, "contains a line that is too long", f"lines below {MOST_LINE:,} bytes"
                )
            yield line


def sha256_of(path: AnyPath) -> str:
    """Return the SHA-256 of a file of any size, in hexadecimal."""
    with open_file(path, Limit.STREAM) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_file(
    source: Path, target: Path, within: Path | None = None, limit: int = Limit.STREAM
) -> None:
    """Copy the content of a file to a new one."""
    with open_file(source, limit, within=within) as content, target.open("xb") as copy:
        shutil.copyfileobj(content, copy)


# -- JSON, TOML, YAML ------------------------------------------------------------------------------


def read_json(path: AnyPath, limit: int = Limit.RECORD, *, within: Path | None = None) -> Any:
    """Return the value in a JSON file."""
    return parse_json(path, read_bytes(path, limit, within=within))


def parse_json(path: AnyPath, content: bytes | str) -> Any:
    """Return the value of the JSON text of a file at `path`."""

    def parse() -> Any:
        text = content if isinstance(content, str) else content.decode("utf-8")
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # raises for a lone surrogate
        return value

    return _parsed(path, "JSON", parse)


def read_json_object(path: AnyPath, *, within: Path | None = None) -> dict[str, Any]:
    """Return the object in a JSON file."""
    table = read_json(path, within=within)
    if not isinstance(table, dict):
        raise UntrustedFileError(path, "is not a JSON object", "a JSON object of names and values")
    return table


def read_toml(path: AnyPath) -> dict[str, Any]:
    """Return the table in a TOML file."""
    text = read_text(path)
    if _LONG_KEY.search(_QUOTED.sub("s", text)):
        raise UntrustedFileError(path, "is nested too deeply", _bound("TOML"))
    return _parsed(path, "TOML", lambda: tomllib.loads(text))


def read_yaml(path: AnyPath) -> Any:
    """Return the value in a YAML file; Python's tags are refused."""
    import yaml

    text = read_text(path)
    return _parsed(path, "YAML", lambda: _yaml_value(text), yaml.YAMLError)


def _yaml_value(text: str) -> Any:
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _expanded_nodes(node, {}) > MOST_NODES:
            raise ValueError(f"its aliases expand to more than {MOST_NODES:,} values")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _expanded_nodes(node: Any, known: dict[int, int]) -> int:
    """Return the number of nodes, with aliases expanded; more than MOST_NODES for a loop."""
    if id(node) not in known:
        known[id(node)] = MOST_NODES + 1  # a loop reads this
        parts = node.value if isinstance(node.value, list) else []
        flat = (child for part in parts for child in (part if isinstance(part, tuple) else (part,)))
        known[id(node)] = 1 + sum(_expanded_nodes(child, known) for child in flat)
    return known[id(node)]


def _parsed(path: AnyPath, kind: str, parse: Callable[[], Any], *others: type[Exception]) -> Any:
    errors: tuple[type[Exception], ...] = (ValueError, *others)
    try:
        value = parse()
    except RecursionError:
        raise UntrustedFileError(path, "is nested too deeply", _bound(kind)) from None
    except errors as error:
        words = " ".join(str(error).split())
        raise UntrustedFileError(path, f"cannot be read: {words[:200]}", kind) from None
    if not _is_shallow(value):
        raise UntrustedFileError(path, "is nested too deeply", _bound(kind))
    return value


def _bound(kind: str) -> str:
    return f"{kind} of at most {MOST_NESTED} levels"


def _is_shallow(value: Any) -> bool:
    """Return whether lists and tables are nested in at most MOST_NESTED levels."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_NESTED):
        parts = (
            container.values() if isinstance(container, dict) else container for container in level
        )
        level = [
            container for part in parts for container in part if isinstance(container, dict | list)
        ]
        if not level:
            return True
    return False


# -- weights and arrays ----------------------------------------------------------------------------


def read_safetensors_header(path: Path, *, within: Path | None = None) -> Mapping[str, Any]:
    """Return {tensor: {"dtype", "shape", "data_offsets"}} of a safetensors file, and its metadata.

    The tensors must fill the file without gaps, as that library requires.
    """
    with open_file(path, Limit.STREAM, within=within) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(Limit.HEADER, size - 8):
            clause = f"cannot be read: its header has {length:,} bytes, the file {size:,}"
            raise UntrustedFileError(path, clause, "a complete safetensors file")
        text = file.read(length)
    table = _parsed(path, "safetensors", lambda: json.loads(text))
    if not isinstance(table, dict):
        raise UntrustedFileError(
            path, "cannot be read: its header is not an object", "a safetensors file"
        )
    if fault := _bad_layout(table, size - 8 - length):
        raise UntrustedFileError(path, f"cannot be read: {fault}", "a complete safetensors file")
    return table


def open_safetensors(path: Path, framework: str = "pt") -> Any:
    """Open a safetensors file for `with`; tensors are read on request."""
    from safetensors import SafetensorError, safe_open

    read_safetensors_header(path)
    try:
        return safe_open(path, framework)
    except (OSError, SafetensorError) as error:
        raise UntrustedFileError(path, f"cannot be read: {error}", "safetensors") from None


def _bad_layout(table: Mapping[str, Any], size: int) -> str | None:
    """Return a clause on why a header does not fit `size` bytes of data; None if it does."""
    notes = table.get(METADATA, {})
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        return f"its {METADATA} does not map strings to strings"
    ranges = []
    for name, tensor in table.items():
        if name != METADATA:
            if (span := _range_of(tensor)) is None:
                return f"its header does not describe {name[:80]!r}"
            ranges.append((*span, name))
    end = 0
    for first, last, name in sorted(ranges):
        if first != end or last > size:
            return f"it does not contain all of {name[:80]!r}"
        end = last
    return None if end == size else f"it has {size - end:,} bytes after its tensors"


def _range_of(tensor: Any) -> tuple[int, int] | None:
    """Return the start and end of a tensor; None if they do not fit its shape and dtype."""
    match tensor:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [first, last]}:
            if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
                return None
            bits = BITS.get(dtype)
            fits = bits is None or math.prod(shape) * bits == (last - first) * 8
            return (first, last) if first <= last and fits else None
    return None


def check_npy(path: Path) -> None:
    """Raise UntrustedFileError unless a .npy file contains a complete array of numbers."""
    from numpy.lib import format as npy

    expected = "a complete .npy file of numbers"
    with open_file(path, Limit.STREAM) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            version = npy.read_magic(file)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = read(file)
        except Exception as error:  # numpy parses the header as Python, which raises anything
            words = " ".join(str(error).split()) or type(error).__name__
            raise UntrustedFileError(path, f"cannot be read: {words[:200]}", expected) from None
        offset = file.tell()
    end = offset + math.prod(shape) * dtype.itemsize
    if dtype.hasobject or min(shape, default=0) < 0 or end != size:
        clause = f"cannot be read: it has {size:,} bytes for {dtype} of the shape {list(shape)}"
        raise UntrustedFileError(path, clause, expected)


# -- folders ---------------------------------------------------------------------------------------


def list_folder(path: AnyPath) -> list[Path]:
    """Return the entries of a folder by name. A name that is not UTF-8 is an error."""
    folder = Path(path)
    check_name(folder)
    paths = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                check_name(entry.path)
                paths.append(folder / entry.name)
                if len(paths) > MOST_ENTRIES:
                    expected = f"at most {MOST_ENTRIES:,}"
                    raise UntrustedFileError(path, "holds too many entries", expected)
    except OSError as error:
        raise UntrustedFileError(path, _words(error), "a folder that can be read") from None
    return sorted(paths)


def walk_folders(
    root: Path, is_end: Callable[[Path], bool], skip: Callable[[UntrustedFileError], None]
) -> Iterator[Path]:
    """Yield a folder and all folders below it, each once, even if several links lead to it.

    Folders below one for which `is_end` is True are not visited. `skip` gets the error of a name
    that is not UTF-8, and of a folder that cannot be read.
    """
    visited, left, seen = set(), [root], 0
    while left:
        folder = left.pop()
        try:
            check_name(folder)
            status = folder.stat()
            if (status.st_dev, status.st_ino) in visited:
                continue
            visited.add((status.st_dev, status.st_ino))
            yield folder
            if is_end(folder):
                continue
            with os.scandir(folder) as entries:
                names = [entry.name for entry in entries if entry.is_dir()]
        except UntrustedFileError as error:
            skip(error)
            continue
        except OSError as error:
            skip(UntrustedFileError(folder, _words(error), "a folder that can be read"))
            continue
        seen += len(names)
        if seen > MOST_ENTRIES:
            raise UntrustedFileError(root, "holds too many folders", f"at most {MOST_ENTRIES:,}")
        left += [folder / name for name in sorted(names, reverse=True)]
