"""Whether the .idx and the .bin of a pair fit each other, found without torch and chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mqo.data.pair import HEADER, MAGIC
from mqo.errors import DataError

if TYPE_CHECKING:
    import numpy as np

# Upstream's codes of the types that ids may have -> numpy's names of them.
TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CHUNK = 1 << 20  # entries that are looked at together


@dataclass(frozen=True)
class Header:
    """What an index says of itself: the code of the ids' type, and how long its three parts are.

    `documents` counts bounds of documents, one more than there are documents.
    """

    code: int
    sequences: int
    documents: int

    @property
    def size(self) -> int:
        """The bytes of an index of these counts: lengths of 4 bytes, offsets and bounds of 8."""
        return HEADER.size + 12 * self.sequences + 8 * self.documents


def read_header(path: Path) -> Header:
    """Return the header of an index of token ids; its counts may be any.

    Raises:
        DataError: it is none.
    """
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or HEADER.unpack(head)[:2] != MAGIC:
        raise _broken(path, "is no index of Megatron's")
    header = Header(*HEADER.unpack(head)[2:])
    if header.code not in TYPES:
        raise _broken(path, f"has the type code {header.code}, and is no index of token ids")
    return header


def document_count(prefix: Path) -> int | None:
    """Return how many documents PREFIX.idx holds; None where it is no index."""
    try:
        return read_header(Path(f"{prefix}.idx")).documents - 1
    except (OSError, DataError):
        return None


def check_pair(prefix: Path) -> None:
    """Check that every sequence lies in PREFIX.bin, and every document's bound in PREFIX.idx.

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
    lengths = _entries(index, "<i4", HEADER.size, header.sequences)
    pointers = _entries(index, "<i8", offsets, header.sequences)
    width = np.dtype(TYPES[header.code]).itemsize
    for length, start in zip(lengths, pointers, strict=True):
        # Not start + length, which may exceed what 8 bytes hold.
        if (length < 0).any() or (start < 0).any() or (start > end - length * width).any():
            raise _broken(index, f"names sequences that are not in {ids}, which has {end:,} bytes")
    before = 0
    for bounds in _entries(index, "<i8", offsets + 8 * header.sequences, header.documents):
        if bounds[0] < before or (bounds[1:] < bounds[:-1]).any():
            raise _broken(index, "has bounds of documents that are not in order")
        before = int(bounds[-1])
    if before != header.sequences:
        raise _broken(index, f"ends its documents at sequence {before:,} of {header.sequences:,}")


def _check_counts(path: Path, header: Header) -> None:
    size = path.stat().st_size
    if header.size > size:
        raise _broken(
            path,
            f"counts {header.sequences:,} sequences and {header.documents:,} bounds of documents, "
            f"for which it would need {header.size:,} bytes, and has {size:,}",
        )
    if not header.sequences or not header.documents:
        raise _broken(path, "holds no documents")


def _entries(path: Path, kind: str, offset: int, count: int) -> Iterator[np.ndarray]:
    """The entries of a part, as int64."""
    import numpy as np

    with path.open("rb") as file:
        file.seek(offset)
        for first in range(0, count, _CHUNK):
            part = np.fromfile(file, kind, min(_CHUNK, count - first))
            yield part.astype(np.int64)


def _broken(path: Path, fault: str) -> DataError:
    return DataError(
        f"{path} {fault}",
        expected="an index as preprocess_data.py writes it, with the .bin that it was written with",
        help="Copy both again, or make them again with Megatron-LM/tools/preprocess_data.py",
    )
