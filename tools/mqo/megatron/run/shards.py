"""Check an entry of a checkpoint's shard before torch loads it.

torch loads each tensor of a shard with torch.load, restricted to weights, and checks its shape only
afterwards. That runs no code, but a few kilobytes can allocate any amount of memory: an archive may
be compressed, the older form of torch.save states the size of its data, and two of the functions
that torch allows create bytes of any length. A pickle of a few MiB can also take minutes, if the
hashes of its keys collide. With these checks a tensor takes no more memory than its shard has
bytes, and its pickle is short.
"""

import io
import os
import pickle
import zipfile
from typing import Any

from torch import _weights_only_unpickler as restricted
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.utils import _ReaderView

IS_TENSOR = "mqo_is_tensor"
_PICKLE_OF_TENSOR = 1 << 16  # bytes; torch writes a few hundred
_LATIN = ("latin1", "latin-1")  # how torch.save writes bytes


class _FileView(_ReaderView):
    """A view of a part of a file; torch's own seeks from the end in the wrong direction."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to an offset from the start or the end of the part."""
        return super().seek(offset if whence == os.SEEK_SET else self.len + offset)


def entry_fault(file: io.IOBase, info: Any) -> str | None:
    """Return a clause on what is wrong with an entry of a shard; None if torch may load it.

    `info` is torch's _StorageInfo of the entry.
    """
    span = (info.offset, info.length)
    if not all(type(number) is int and number >= 0 for number in span):
        return f"contains an entry with offset and length {span}"
    size = os.fstat(file.fileno()).st_size
    if sum(span) > size:
        return f"has {size:,} bytes, and {sum(span):,} are expected"
    if info.transform_descriptors:
        return f"stores an entry with the transform {info.transform_descriptors}"
    try:
        with zipfile.ZipFile(_FileView(file, *span)) as archive:
            parts = archive.infolist()
    except Exception:  # a damaged archive raises anything
        return "contains an entry that torch.save did not write"
    expanded = sum(part.file_size for part in parts)
    if expanded > info.length:
        return f"contains an entry of {info.length:,} bytes that expands to {expanded:,}"
    pickled = sum(part.file_size for part in parts if part.filename.endswith("data.pkl"))
    if getattr(info, IS_TENSOR, True) and pickled > _PICKLE_OF_TENSOR:
        return f"describes a tensor in {pickled:,} bytes"
    return None


def mark_tensors(metadata: Metadata) -> None:
    """Mark in torch's record of each entry whether it is a tensor, for `entry_fault`."""
    for index, info in (metadata.storage_data or {}).items():
        described = metadata.state_dict_metadata.get(index.fqn)
        setattr(info, IS_TENSOR, not isinstance(described, BytesStorageMetadata))


def bound_constructors() -> None:
    """Limit the bytes that a restricted load creates to the length of their pickle."""
    allowed = restricted._get_allowed_globals()
    for name, function in (("builtins.bytearray", _bytearray), ("_codecs.encode", _encode)):
        if name in allowed:
            allowed[name] = function


def _bytearray(*content: Any) -> bytearray:
    if any(isinstance(part, int) for part in content):
        raise pickle.UnpicklingError("a bytearray of a length instead of a content")
    return bytearray(*content)


def _encode(text: str, encoding: str = "utf-8") -> bytes:
    if not isinstance(text, str) or encoding not in _LATIN:
        raise pickle.UnpicklingError(f"bytes encoded as {encoding!r:.40}")
    return text.encode(encoding)
