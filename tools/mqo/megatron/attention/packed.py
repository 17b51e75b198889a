"""Find the documents in packed sequences, where each token sees only its own document."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mqo.megatron.attention.chunks import Span
from mqo.megatron.attention.context import SequencePart, chunk_starts


def document_starts(packed: Any, tokens: int) -> tuple[int, ...]:
    """Return the start of each document in `tokens` tokens, from upstream's PackedSeqParams.

    Padding belongs to the document before it. Synchronizes with the device once per micro-batch.

    Raises:
        ValueError: keys and queries are packed differently, or not in the form 'thd'.
    """
    known = getattr(packed, "mqo_starts", None)
    if known is None:
        known = packed.mqo_starts = _read(packed)
    return tuple(start for start in known if start < tokens)


def spans_of(
    queries: int, keys: int, part: SequencePart, starts: tuple[int, ...] = ()
) -> list[Span]:
    """Return the causal spans of a layer's queries, for a sequence, chunks or documents.

    Args:
        queries, keys: their numbers; fewer queries than keys have the last positions.
        part: (index, number) of the part of the sequence with these queries.
        starts: the first token of each document, for packed sequences.
    """
    if starts:
        return [Span(start, stop, start, first=start) for start, stop in pairwise((*starts, keys))]
    if part[1] == 1:
        return [Span(0, queries, keys - queries)]
    size = queries // 2
    places = enumerate(chunk_starts(queries, part))
    return [Span(i * size, (i + 1) * size, start) for i, start in places]


def _read(packed: Any) -> tuple[int, ...]:
    ends = [_ends(packed, kind) for kind in ("q", "kv")]
    if packed.qkv_format != "thd":
        raise ValueError(f"sequences are packed as {packed.qkv_format}; valid: thd")
    if ends[0] is not ends[1] and not torch.equal(*ends):
        raise ValueError("the keys are packed differently from the queries")
    return tuple(sorted({0, *ends[0].tolist()}))


def _ends(packed: Any, kind: str) -> Tensor:
    padded = getattr(packed, f"cu_seqlens_{kind}_padded", None)
    return padded if padded is not None else getattr(packed, f"cu_seqlens_{kind}")
