"""Write a run's metrics.jsonl, quant_stats.json, device.json, ended.json and failure.txt."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mqo.megatron.device import HAS_CUDA, accelerator
from mqo.megatron.run import disk, guard, observe, unpickle
from mqo.megatron.run.checkpoints import keep_last
from mqo.megatron.run.divergence import DivergenceError, error_text
from mqo.megatron.run.files import RunFiles, jsonable, run_folder
from mqo.megatron.run.packages import record_packages
from mqo.megatron.run.ranks import rank
from mqo.quant.collectives import all_ranks
from mqo.quant.config import current
from mqo.quant.finite import FiniteError
from mqo.quant.record import QuantRecord


@contextmanager
def recorded(writer: Any) -> Iterator[None]:
    """Write a training run's metrics during it, and the quantizers' records at the end.

    `writer` is upstream's TensorBoard writer, on the last rank; its scalars are also written to
    metrics.jsonl. The text of the first failure of any rank is written to failure.txt. A
    FiniteError becomes a DivergenceError, which explains more.
    """
    folder = run_folder()
    if folder is None:
        yield
        return
    if writer is not None:
        _copy_scalars(writer, folder.metrics)
    observe.use_writer(writer)
    early: SystemExit | None = None
    try:
        try:
            yield
        except SystemExit as leaving:
            if leaving.code:
                raise
            early = leaving  # as upstream's trainer ends at --exit-interval and --exit-duration
        keep_last(current().keep_checkpoints)
        record_packages()
        records = guard.gather()
        peaks = all_ranks(peak_memory())
        if rank() == 0:
            write_stats(folder.quant_stats, records)
            # "cpu" or the name of this rank's GPU, and each rank's bytes.
            table = {"device": accelerator.get_device_name(), "peak_memory": peaks}
            folder.device.write_text(json.dumps(table, indent=1), encoding="utf-8")
        guard.check_all(records)
        if not early:
            _note_end(folder)
    except FiniteError as error:
        diverged = DivergenceError(error_text(str(error), layer_is_known=True))
        _leave(folder.failure, diverged)
        raise diverged from error
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # upstream's CheckpointException is not an Exception
        explained = disk.explain(error) or unpickle.explain(error)
        _leave(folder.failure, explained or error)
        if explained:
            raise explained from (
                None if isinstance(explained, unpickle.CheckpointError) else error
            )
        raise
    if early:
        raise early


def _note_end(folder: RunFiles) -> None:
    """Write ended.json, on each node, after everything that the trainer does at the end.

    `steps` is the number of steps in this process: 0 if an earlier one trained the last step.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        table = {"steps": guard.steps_begun()}
        folder.ended.write_text(json.dumps(table), encoding="utf-8")


def peak_memory() -> int:
    """Return the peak memory of this process in bytes: on its GPU, else resident."""
    if HAS_CUDA:
        return accelerator.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def _leave(path: Path, error: BaseException) -> None:
    """Write the error's text, unless another rank has written one: later errors follow from it.

    A failing rank writes before it closes its connections, which makes the others fail.
    """
    with suppress(OSError), path.open("x", encoding="utf-8") as file:
        file.write(f"{type(error).__name__}: {error}\n")


def write_stats(path: Path, records: list[QuantRecord]) -> None:
    """Write type, calls and the SQNR in dB of measured calls, by site, layer and operand."""
    rows = [asdict(record) | {"sqnr_db": record.sqnr_db} for record in records]
    path.write_text(json.dumps(jsonable(rows), indent=1, allow_nan=False), encoding="utf-8")


def _copy_scalars(writer: Any, path: Path) -> None:
    """Make the writer also write each scalar as a line of JSON.

    Upstream plots each metric a second time over samples; this copy is skipped.
    """
    add_scalar = writer.add_scalar

    def add(tag: str, value: Any, iteration: int, *args: Any, **kwargs: Any) -> None:
        add_scalar(tag, value, iteration, *args, **kwargs)
        if not tag.endswith(" vs samples"):
            row = {"iteration": int(iteration), "name": tag, "value": jsonable(float(value))}
            with path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")

    writer.add_scalar = add
