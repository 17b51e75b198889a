"""Whether an index was made with a tokenizer: its token ids must be ones that the tokenizer has."""

from __future__ import annotations

import json
from pathlib import Path

from mqo.data.pair_check import TYPES, read_header
from mqo.errors import DataError

_WINDOWS, _WINDOW = 64, 1 << 16  # parts of a large index that are looked at, and ids in each


def check_fit(tokenizer: Path, prefix: Path) -> None:
    """Raises DataError if PREFIX.bin holds an id beyond the tokenizer's, or PREFIX.idx is no index.

    Of an index of more than 4 M tokens it reads as many, evenly spread. A tokenizer without
    tokenizer.json is not checked: its size is known to its own library alone.
    """
    largest = largest_id(prefix)
    size = vocabulary_size(tokenizer)
    if size is None or largest < size:
        return
    raise DataError(
        f"{prefix} holds token {largest:,}, and the tokenizer at {tokenizer} ends at {size - 1:,}",
        expected="an index that was made with this tokenizer",
        help="Give the tokenizer of the index, or make the index again with "
        "Megatron-LM/tools/preprocess_data.py",
    )


def largest_id(prefix: Path) -> int:
    """The largest token id that was looked at, -1 of an empty index; DataError if it is none."""
    import numpy as np

    kind = np.dtype(TYPES[read_header(Path(f"{prefix}.idx")).code])
    path = Path(f"{prefix}.bin")
    tokens = path.stat().st_size // kind.itemsize
    starts = range(0, tokens, max(_WINDOW, tokens // _WINDOWS))
    parts = (np.fromfile(path, kind, _WINDOW, offset=first * kind.itemsize) for first in starts)
    return max((int(part.max()) for part in parts), default=-1)


def vocabulary_size(tokenizer: Path) -> int | None:
    """One more than the largest id of tokenizer.json; None if there is no such file, or no ids."""
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        added = [token["id"] for token in table.get("added_tokens", [])]
        ids = [*table["model"]["vocab"].values(), *added]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return max(ids) + 1 if ids else None
