"""Split the queries of attention into chunks, and find the keys that each chunk needs.

This module imports only the standard library, because commands do not load torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import lcm, prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# The score of a hidden key, as in upstream's masks.
HIDDEN = -10000.0
# Elements of a chunk's scores: what fits in the caches of a CPU, or fills a GPU.
BUDGET = {"cpu": 2**20, "cuda": 2**25}
# Chunks begin and end at multiples of this many keys, and queries, if the sequence continues.
_KEYS, _QUERIES = 64, 32
# Most distinct numbers of keys in chunks, because libraries compile a kernel for each.
_LENGTHS = 16
_MOST_QUERIES = 512


@dataclass(frozen=True)
class Span:
    """Queries `start` to `stop`, of which the i-th sees the keys `first` to `position` + i."""

    start: int
    stop: int
    position: int
    first: int = 0


@dataclass(frozen=True)
class Visible:
    """The keys that queries see, as spans that cover all queries in order.

    `mask` [b or 1, 1, sq, sk] is True for keys that are hidden in addition.
    """

    spans: tuple[Span, ...]
    mask: Tensor | None = None

    @classmethod
    def by(cls, mask: Tensor, queries: int, keys: int) -> Visible:
        """Return the visibility that only a mask defines."""
        return cls((Span(0, queries, keys - 1),), mask)


@dataclass(frozen=True)
class Chunk:
    """Queries `start` to `stop` of the matrices `first` to `last`.

    A matrix is a group of heads of one sequence that share their keys. The queries read the keys
    `low` to `high`. The first `before` of them are hidden from all queries. Of the last `later`
    keys, the i-th query sees i.
    """

    first: int
    last: int
    start: int
    stop: int
    low: int
    high: int
    before: int
    later: int


@dataclass(frozen=True)
class ChunkPlan:
    """How attention is split: `matrices` of `repeats` heads, each `queries` by `keys`.

    A chunk reads whole blocks of at least `block` keys, and skips blocks that are hidden from all
    of its queries. With `whole` it reads every key. It begins at a multiple of `row_block` queries
    of its span.
    """

    matrices: int
    repeats: int
    queries: int
    keys: int
    visible: Visible
    block: int
    device: str
    whole: bool = False
    row_block: int = 1

    @cached_property
    def rows(self) -> int:
        """Return the queries of a chunk."""
        longest = max(span.stop - span.start for span in self.visible.spans)
        least = lcm(_QUERIES, self.row_block)
        rows = min(self._budget // least * least, max(_MOST_QUERIES, least), longest)
        return max(min(least, longest), rows)

    @cached_property
    def count(self) -> int:
        """Return the matrices of a chunk."""
        return max(1, min(self.matrices, self._budget // self.rows))

    @cached_property
    def _budget(self) -> int:
        budget = BUDGET.get(self.device, BUDGET["cuda"])
        return max(1, budget // (self.repeats * self._reach))

    @cached_property
    def _cut(self) -> int:
        """Return the number of keys at whose multiples chunks begin and end."""
        block = lcm(self.block, _KEYS)
        return block * -(-self.keys // (block * _LENGTHS))

    @cached_property
    def _reach(self) -> int:
        """Return the most keys that a chunk reads."""
        if self.whole:
            return self.keys
        ends = [span.position + span.stop - span.start for span in self.visible.spans]
        starts = [span.first // self._cut * self._cut for span in self.visible.spans]
        reach = max(end - start for start, end in zip(starts, ends, strict=True))
        return min(self.keys, -(-reach // self._cut) * self._cut)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return the most heads, queries and keys in a chunk."""
        return self.count * self.repeats, self.rows, self._reach

    @property
    def elements(self) -> int:
        """Return the number of scores in the largest chunk."""
        return prod(self.shape)

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks in the order of matrices, then queries."""
        rows, block, whole = self.rows, self._cut, self.whole
        for first in range(0, self.matrices, self.count):
            last = min(first + self.count, self.matrices)
            for span in self.visible.spans:
                for start in range(span.start, span.stop, rows):
                    stop = min(start + rows, span.stop)
                    all_see = span.position + start - span.start + 1
                    needed = all_see + stop - start - 1
                    high = self.keys if whole else min(self.keys, -(-needed // block) * block)
                    low = 0 if whole else span.first // block * block
                    hidden = span.first - low, max(0, high - all_see)
                    yield Chunk(first, last, start, stop, low, high, *hidden)
