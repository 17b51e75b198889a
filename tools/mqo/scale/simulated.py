"""Look up the memory of simulated layouts in simulated.csv.

`python benchmarks/layouts.py` makes the table with `mqo simulate`. It has the standard
configuration of each model; the memory of other sizes is computed (memory.py).
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
# The columns that identify a row. Experts get UNEVEN times their even share of tokens.
KEYS = ("model", "gpus", "global_batch", "micro_batch", "sequence", "dtype", "attention", "flags")


def key_of(
    model: str, training: Training, attention: str, layout: Layout, dtype: Dtype
) -> tuple[str, ...]:
    """Return the values of KEYS in a layout's row."""
    sizes = (layout.gpus, training.global_batch, training.micro_batch, training.sequence)
    return (model, *map(str, sizes), dtype, attention, " ".join(layout.flags(dtype)))


def simulated_need(
    model: Model, training: Training, arithmetic: Arithmetic, layout: Layout, dtype: Dtype
) -> int | None:
    """Return the bytes of the worst rank's tensors; None if the layout was not simulated.

    The type of linear layers does not matter: rounded operands are freed before the peak. A
    HybridModel of a GPT's layers needs the same, unless it recomputes layers: they are smaller.
    """
    if model.gpt != models().get(model.name) or (model.pattern and layout.recompute == "full"):
        return None
    return _rows().get(key_of(model.name, training, arithmetic.attention, layout, dtype))


@functools.cache
def _rows() -> Mapping[tuple[str, ...], int]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {tuple(row[key] for key in KEYS): int(row["bytes"]) for row in csv.DictReader(file)}
