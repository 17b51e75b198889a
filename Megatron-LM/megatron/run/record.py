"""metrics.jsonl, quant_stats.json and failure.txt: what a run writes of itself."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron.quant import QuantRecord
from megatron.quant.config import ENVIRONMENT_VARIABLE

METRICS, QUANT_STATS, FAILURE = "metrics.jsonl", "quant_stats.json", "failure.txt"


def run_folder() -> Path | None:
    """The folder of this run's quant.toml; None for a run without one."""
    path = os.environ.get(ENVIRONMENT_VARIABLE)
    return Path(path).parent if path else None


@contextmanager
def recorded(writer: Any) -> Iterator[None]:  # noqa: ANN401 - a SummaryWriter, or None
    """Around a training run: metrics as they come, the quantisers' records at the end.

    `writer` is upstream's TensorBoard writer, which lives on the last rank; every scalar that it is
    given is written to metrics.jsonl, too. A failure's text is left in failure.txt.
    """
    from . import guard  # guard needs run_folder

    folder = run_folder()
    if folder is None:
        yield
        return
    if writer is not None:
        _copy_scalars(writer, folder / METRICS)
    try:
        yield
        records = guard.gather()
        if _rank() == 0:
            write_stats(folder / QUANT_STATS, records)
        guard.check(records, "at the end")
    except Exception as error:
        if _rank() == 0 or not torch.distributed.is_initialized():
            (folder / FAILURE).write_text(f"{type(error).__name__}: {error}\n", encoding="utf-8")
        raise


def write_stats(path: Path, records: list[QuantRecord]) -> None:
    """Per site, layer and operand: type, calls, and the SQNR in dB of the measured ones."""
    rows = [{**asdict(record), "sqnr_db": _number(record.sqnr_db)} for record in records]
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")


def _copy_scalars(writer: Any, path: Path) -> None:  # noqa: ANN401 - a SummaryWriter
    """Write each scalar as a line of JSON, next to what TensorBoard gets.

    Upstream plots each metric a second time over samples; that copy holds nothing new.
    """
    add_scalar = writer.add_scalar

    def add(tag: str, value: Any, iteration: int, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        add_scalar(tag, value, iteration, *args, **kwargs)
        if not tag.endswith(" vs samples"):
            row = {"iteration": int(iteration), "name": tag, "value": _number(float(value))}
            with path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")

    writer.add_scalar = add


def _number(value: float | None) -> float | str | None:
    """JSON has no NaN and no infinity: those are written as text."""
    return value if value is None or math.isfinite(value) else str(value)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
