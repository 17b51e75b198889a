"""Megatron's .bin/.idx pairs, written aside: a folder that holds them until they are whole.

    PREFIX.partial/   KEY.bin   token ids          lock        held while a process writes
                      KEY.len   int32 a document   state.json  how far they count, after a save

The bytes are those of upstream's own builder fed one document at a time; a test compares them.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from filelock import FileLock, Timeout

from mqo.errors import DataError
from mqo.output import target_of
from mqo.untrusted import read_json_object

if TYPE_CHECKING:
    import numpy as np

# Upstream's index begins so: magic, version, code of the ids' type, counts of sequences, documents.
HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00", 1
_TWO_BYTES_BELOW = 65_500  # upstream's bound
CODES = {2: 8, 4: 4}  # bytes an id -> upstream's code of the type


@dataclass(frozen=True)
class State:
    """How far a corpus is indexed: the next chunk (its file, its number), and what was counted.

    `tokens` counts end-of-document tokens, `skipped` empty documents, `bad` unusable ones.
    """

    file: int = 0
    chunk: int = 0
    documents: int = 0
    tokens: int = 0
    skipped: int = 0
    bad: int = 0


def id_type(vocab_size: int) -> type[np.number]:
    """Return the type that ids are written in: two bytes where the vocabulary allows it."""
    import numpy as np

    return np.uint16 if vocab_size < _TWO_BYTES_BELOW else np.int32


class Pairs:
    """The pairs of some JSON keys, PREFIX_KEY_document.bin and .idx; one process at a time.

    `inputs` tells what they are made of: files of another digest are thrown away, and those of the
    same one are continued at `state`. Leaving the context keeps what was written. Raises DataError
    if another process is writing them.
    """

    def __init__(self, prefix: Path, keys: tuple[str, ...], inputs: str, width: int) -> None:
        self._folder = prefix.with_name(prefix.name + ".partial")
        self._prefix, self._keys, self._inputs, self._width = prefix, keys, inputs, width
        for path in (self._folder, *(path for key in keys for path in self._pair(key))):
            target_of(path)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(self._folder / "lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise DataError(
                f"Another process is writing {prefix}", help="Wait for it, or give another output"
            ) from None
        self.state, sizes = self._load()
        names = [f"{key}.{end}" for key in keys for end in ("bin", "len")]
        self._files = {name: (self._folder / name).open("ab") for name in names}
        for name, file in self._files.items():
            file.truncate(sizes.get(name, 0))

    def _load(self) -> tuple[State, dict[str, int]]:
        try:
            saved: dict[str, Any] = read_json_object(self._folder / "state.json")
            state, sizes = State(**saved["state"]), saved["sizes"]
            if not all(_counts(value) for value in (*asdict(state).values(), *sizes.values())):
                return State(), {}
            whole = all((self._folder / n).stat().st_size >= size for n, size in sizes.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return State(), {}
        if saved.get("inputs") != self._inputs or not whole:
            return State(), {}
        return state, sizes

    def add(self, key: str, ids: bytes, lengths: bytes) -> None:
        """Add documents: their ids, and the number of ids of each as int32."""
        self._files[f"{key}.bin"].write(ids)
        self._files[f"{key}.len"].write(lengths)

    def save(self, state: State) -> None:
        """Make `state` the one to continue at."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        sizes = {name: file.tell() for name, file in self._files.items()}
        saved = {"inputs": self._inputs, "state": asdict(state), "sizes": sizes}
        fresh = self._folder / "state.json.new"
        fresh.write_text(json.dumps(saved), encoding="utf-8")
        fresh.replace(self._folder / "state.json")

    def finish(self) -> None:
        """Write the indexes, give all files their names, and remove the folder."""
        self._close_files()
        for key in self._keys:
            _write_index(self._folder / f"{key}.idx", self._folder / f"{key}.len", self._width)
        for key in self._keys:
            content, index = self._pair(key)
            # An index of older data must at no time stand beside the new data.
            index.unlink(missing_ok=True)
            (self._folder / f"{key}.bin").replace(content)
            (self._folder / f"{key}.idx").replace(index)
        shutil.rmtree(self._folder)

    def _pair(self, key: str) -> tuple[Path, Path]:
        """Return the paths of the two files of a key."""
        name = f"{self._prefix.name}_{key}_document"
        return self._prefix.with_name(f"{name}.bin"), self._prefix.with_name(f"{name}.idx")

    def discard(self) -> None:
        """Remove everything that was written."""
        shutil.rmtree(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_files()
        self._lock.release()

    def _close_files(self) -> None:
        for file in self._files.values():
            file.close()


def _counts(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _write_index(path: Path, lengths: Path, width: int) -> None:
    """Write header, lengths (int32), offsets in bytes (int64), bounds of the documents (int64)."""
    import numpy as np

    sizes = np.fromfile(lengths, np.int32)
    ends = np.cumsum(sizes, dtype=np.int64) * width
    with path.open("wb") as file:
        file.write(HEADER.pack(*MAGIC, CODES[width], len(sizes), len(sizes) + 1))
        for part in (sizes, ends - sizes.astype(np.int64) * width, np.arange(len(sizes) + 1)):
            part.tofile(file)
