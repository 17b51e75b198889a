"""Layouts that were simulated: what a GPU of each needs (simulated.csv).

`python benchmarks/layouts.py` makes the table, by `mqo simulate`. It holds the standard
configuration of each model; other sizes are computed (memory.py).
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from pathlib import Path

from mqo.matrix.tables import Dtype, Model, Training, models
from mqo.scale.layout import Layout
from mqo.scale.memory import Arithmetic

TABLE = Path(__file__).with_name("simulated.csv")
# What tells a row from the others. Experts get UNEVEN times their even share of tokens.
Key = tuple[str, int, int, int, int, str, str, str]


def key_of(model: str, training: Training, attention: str, layout: Layout, dtype: Dtype) -> Key:
    """Return the key of a layout's row."""
    sizes = (training.global_batch, training.micro_batch, training.sequence)
    return (model, layout.gpus, *sizes, dtype, attention, " ".join(layout.flags(dtype)))


def simulated_need(
    model: Model, training: Training, arithmetic: Arithmetic, layout: Layout, dtype: Dtype
) -> int | None:
    """Return the bytes that the worst rank's tensors take; None where nobody simulated it.

    The type of linear layers changes nothing: rounded operands are gone before the peak.
    """
    if model != models().get(model.name):
        return None
    return _rows().get(key_of(model.name, training, arithmetic.attention, layout, dtype))


@functools.cache
def _rows() -> Mapping[Key, int]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {_key(row): int(row["bytes"]) for row in csv.DictReader(file)}


def _key(row: Mapping[str, str]) -> Key:
    numbers = (int(row[name]) for name in ("gpus", "global_batch", "micro_batch", "sequence"))
    gpus, batch, micro_batch, sequence = numbers
    words = (row["dtype"], row["attention"], row["flags"])
    return (row["model"], gpus, batch, micro_batch, sequence, *words)
