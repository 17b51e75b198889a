"""Packed sequences: concatenated documents, in which each token sees only its own document."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mqo.megatron.attention.chunks import Span
from mqo.megatron.attention.context import Part, chunk_starts


def document_starts(packed: Any, tokens: int) -> tuple[int, ...]:
    """Return where the documents of so many tokens begin; `packed` are upstream's PackedSeqParams.

    Padding belongs to the document before it. Synchronizes with the device once per micro-batch.

    Raises:
        ValueError: keys are packed otherwise than queries, or are not in the form 'thd'.
    """
    known = getattr(packed, "mqo_starts", None)
    if known is None:
        known = packed.mqo_starts = _read(packed)
    return tuple(start for start in known if start < tokens)


def spans_of(queries: int, keys: int, part: Part, starts: tuple[int, ...] = ()) -> list[Span]:
    """Return what a layer's queries see: causal, of a sequence, a rank's chunks, or documents.

    Args:
        queries, keys: how many; fewer queries than keys are the last ones.
        part: which of how many parts of the sequence the queries are.
        starts: where documents begin, of packed sequences.
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
        raise ValueError("the keys are not packed as the queries are")
    return tuple(sorted({0, *ends[0].tolist()}))


def _ends(packed: Any, kind: str) -> Tensor:
    padded = getattr(packed, f"cu_seqlens_{kind}_padded", None)
    return padded if padded is not None else getattr(packed, f"cu_seqlens_{kind}")
