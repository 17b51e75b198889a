"""A forward pass before the one that trains, which leaves no trace in the quantizers."""

from collections.abc import Iterator
from contextlib import contextmanager

from . import micro_batches
from .record import RECORDER


@contextmanager
def extra_pass() -> Iterator[None]:
    """Neither record nor count what is quantized in this block.

    Stochastic rounding draws the same numbers in the block and in the forward passes after it.
    """
    with RECORDER.paused(), micro_batches.uncounted():
        yield
