"""Check that a pair exists, and that its .idx fits its .bin and a tokenizer, without torch."""

from __future__ import annotations

import difflib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mqo.errors import DataError, MissingError
from mqo.untrusted import Limit, open_file, read_json, reading

if TYPE_CHECKING:
    import numpy as np

# The start of upstream's index: magic, version, code of the ids' type, number of sequences, number
# of document bounds.
HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00", 1
# Upstream's codes of the types of ids -> numpy's names.
TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CHUNK = 1 << 20  # entries to check at a time
_WINDOWS, _WINDOW = 64, 1 << 16  # windows of a large .bin to check, and ids in each
_SUFFIXES = (".bin", ".idx")


@dataclass(frozen=True)
class Header:
    """The header of an index: the code of the ids' type, and the lengths of its three parts.

    `documents` counts document bounds, one more than there are documents.
    """

    code: int
    sequences: int
    documents: int

    @property
    def size(self) -> int:
        """Return the bytes of an index of these counts: lengths take 4, offsets and bounds 8."""
        return HEADER.size + 12 * self.sequences + 8 * self.documents


def read_header(path: Path) -> Header:
    """Return the header of an index of token ids; its counts are not checked.

    Raises:
        DataError: it is not such an index.
    """
    with reading(DataError), open_file(path, Limit.STREAM) as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or HEADER.unpack(head)[:2] != MAGIC:
        raise _broken(path, "is not an index of Megatron")
    header = Header(*HEADER.unpack(head)[2:])
    if header.code not in TYPES:
        raise _broken(path, f"has the type code {header.code}, which is not that of token ids")
    return header


def document_count(prefix: Path) -> int | None:
    """Return the number of documents in PREFIX.idx; None if it is not an index."""
    try:
        return read_header(Path(f"{prefix}.idx")).documents - 1
    except (OSError, DataError):
        return None


def lengths(prefix: Path) -> Iterator[int]:
    """Yield the number of tokens of each sequence of a pair."""
    index = Path(f"{prefix}.idx")
    for part in _entries(index, "<i4", HEADER.size, read_header(index).sequences):
        yield from part.tolist()


def check_pair(prefix: Path) -> None:
    """Check that every sequence is inside PREFIX.bin, and every document's bound inside PREFIX.idx.

    Reads the whole index, a chunk at a time, and none of the ids.

    Raises:
        DataError: the text names the file and its fault.
    """
    import numpy as np

    index, ids = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    header, end = read_header(index), ids.stat().st_size
    _check_counts(index, header)
    if not end:
        raise _broken(ids, "is empty")
    offsets = HEADER.size + 4 * header.sequences
    sizes = _entries(index, "<i4", HEADER.size, header.sequences)
    pointers = _entries(index, "<i8", offsets, header.sequences)
    width = np.dtype(TYPES[header.code]).itemsize
    for length, start in zip(sizes, pointers, strict=True):
        # Not start + length, which may exceed what 8 bytes hold.
        if (length < 0).any() or (start < 0).any() or (start > end - length * width).any():
            raise _broken(index, f"names sequences that are not in {ids}, which has {end:,} bytes")
    before = 0
    for bounds in _entries(index, "<i8", offsets + 8 * header.sequences, header.documents):
        if bounds[0] < before or (bounds[1:] < bounds[:-1]).any():
            raise _broken(index, "has document bounds that are not in order")
        before = int(bounds[-1])
    if before != header.sequences:
        raise _broken(index, f"ends its documents at sequence {before:,} of {header.sequences:,}")


def _check_counts(path: Path, header: Header) -> None:
    size = path.stat().st_size
    if header.size > size:
        raise _broken(
            path,
            f"counts {header.sequences:,} sequences and {header.documents:,} document bounds, "
            f"which need {header.size:,} bytes, but has {size:,}",
        )
    if not header.sequences or not header.documents:
        raise _broken(path, "holds no documents")


def _entries(path: Path, kind: str, offset: int, count: int) -> Iterator[np.ndarray]:
    """Yield the entries of a part, as int64."""
    import numpy as np

    with open_file(path, Limit.STREAM) as file:
        file.seek(offset)
        for first in range(0, count, _CHUNK):
            part = np.fromfile(file, kind, min(_CHUNK, count - first))
            yield part.astype(np.int64)


def _broken(path: Path, fault: str) -> DataError:
    return DataError(
        f"{path} {fault}",
        expected="an index that preprocess_data.py wrote, with the .bin of the same run",
        help="Copy both again, or make them again with Megatron-LM/tools/preprocess_data.py",
    )


# -- a prefix that the user gives ------------------------------------------------------------------


def check_prefix(prefix: Path) -> None:
    """Check that PREFIX.bin and PREFIX.idx exist, and fit each other.

    Raises:
        MissingError: a file is missing; the text names what exists, and what helps.
        DataError: the text names a file and its fault.
    """
    missing = _missing(prefix)
    if not missing:
        check_pair(prefix)
        return
    raise MissingError(
        f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing in "
        f"{prefix.parent}; {_seen(prefix)}",
        expected=f"{prefix.name}.bin and {prefix.name}.idx, as preprocess_data.py writes them",
        help=_advice(prefix),
    )


def is_there(prefix: Path) -> bool:
    """Return whether PREFIX.bin and PREFIX.idx exist."""
    return not _missing(prefix)


def _missing(prefix: Path) -> list[str]:
    names = [prefix.name + suffix for suffix in _SUFFIXES]
    return [name for name in names if not (prefix.parent / name).is_file()]


def _complete(folder: Path) -> list[str]:
    """Return the names in `folder` that have both files."""
    stems = {p.name[:-4] for p in folder.glob("*.bin") if p.is_file()}
    return sorted(s for s in stems if (folder / f"{s}.idx").is_file())


def _seen(prefix: Path) -> str:
    if not prefix.parent.is_dir():
        return "there is no such folder"
    complete = _complete(prefix.parent)
    if not complete:
        files = sorted(p.name for p in prefix.parent.iterdir())
        if not files:
            return "the folder is empty"
        listed = ", ".join(files[:5]) + (", ..." if len(files) > 5 else "")
        return f"the folder holds no pair of .bin and .idx, but {listed}"
    near = difflib.get_close_matches(prefix.name, complete, n=3, cutoff=0.5) or complete[:3]
    return f"the folder holds {', '.join(near)}"


def _advice(prefix: Path) -> str:
    # The most common mistake is to name one of the two files instead of their prefix.
    if prefix.suffix in _SUFFIXES and not _missing(prefix.with_suffix("")):
        return f"Give the prefix without its ending: {prefix.with_suffix('')}"
    extended = prefix.with_name(prefix.name + "_text_document")
    if not _missing(extended):
        return f"Give {extended}, because preprocess_data.py adds the JSON key to the name"
    return (
        "Give the path without .bin or .idx, or make the pair with "
        "Megatron-LM/tools/preprocess_data.py"
    )


# -- a tokenizer -----------------------------------------------------------------------------------


def check_fit(tokenizer: Path, prefix: Path) -> None:
    """Raise DataError if PREFIX.bin has an id that the tokenizer lacks.

    The check reads at most 4 M tokens, in evenly spread windows. A tokenizer without tokenizer.json
    is not checked, because only its own library knows its size.
    """
    largest = largest_id(prefix)
    size = vocabulary_size(tokenizer)
    if size is None or largest < size:
        return
    raise DataError(
        f"{prefix} holds token {largest:,}, but the largest id of the tokenizer at {tokenizer} "
        f"is {size - 1:,}",
        expected="an index that was made with this tokenizer",
        help="Give the tokenizer of the index, or make the index again with "
        "Megatron-LM/tools/preprocess_data.py",
    )


def largest_id(prefix: Path) -> int:
    """Return the largest id in the checked windows, -1 if empty; DataError without an index."""
    import numpy as np

    kind = np.dtype(TYPES[read_header(Path(f"{prefix}.idx")).code])
    path = Path(f"{prefix}.bin")
    largest = -1
    with reading(DataError), open_file(path, Limit.STREAM) as file:
        tokens = path.stat().st_size // kind.itemsize
        for first in range(0, tokens, max(_WINDOW, tokens // _WINDOWS)):
            file.seek(first * kind.itemsize)
            largest = max(largest, int(np.fromfile(file, kind, _WINDOW).max()))
    return largest


def vocabulary_size(tokenizer: Path) -> int | None:
    """Return one more than the largest id in tokenizer.json; None if it has none."""
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        table = read_json(path, Limit.TOKENIZER)
        added = [token["id"] for token in table.get("added_tokens", [])]
        largest = max([*table["model"]["vocab"].values(), *added])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return largest + 1 if isinstance(largest, int) else None
