"""Write a step's measurements to TensorBoard and metrics.jsonl, and dump operands."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from mqo.megatron.run.files import run_folder
from mqo.megatron.run.ranks import rank
from mqo.quant.collectives import all_ranks
from mqo.quant.measurement import Measurement, merge
from mqo.quant.record import RECORDER

# The names of a measurement's numbers.
SCALARS = ("sqnr_db", "bias", "underflow", "saturation", "scale_spread", "amax")
# Upstream's TensorBoard writer, on the rank that has one.
_writer: Any = None


def use_writer(writer: Any) -> None:
    """Set the writer of measurements; None if this rank does not write."""
    global _writer
    _writer = writer


def end_step(iteration: int) -> None:
    """Write this iteration's measurements and dumped operands, if any.

    A collective in measured iterations.
    """
    folder = run_folder()
    if folder is None:
        return
    if RECORDER.has_gradients:
        for record in merge(all_ranks(RECORDER.take_gradients())):
            if _writer is not None and record.noise_ratio is not None:
                tag = f"quant/{record.site}/{record.layer}/{record.operand}/noise_ratio"
                _writer.add_scalar(tag, record.noise_ratio, iteration)
    if RECORDER.measuring:
        measurements = merge(all_ranks(RECORDER.end_step()))
        if _writer is not None:
            for measurement in measurements:
                _write(_writer, folder.metrics, iteration, measurement)
    kept = RECORDER.take_dump()
    if kept:
        dump(folder.dumps, iteration, kept)


def dump(folder: Path, iteration: int, operands: dict[str, Tensor]) -> None:
    """Save {site/layer/operand: tensor} of this rank as a safetensors file."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    facts = {"iteration": str(iteration), "rank": str(rank())}
    target = folder / f"iteration_{iteration}_rank_{rank()}.safetensors"
    save_file(operands, target, metadata=facts)


def _write(writer: Any, metrics: Path, iteration: int, measurement: Measurement) -> None:
    tag = f"quant/{measurement.site}/{measurement.layer}/{measurement.operand}"
    for name in SCALARS:
        value = getattr(measurement, name)
        if value is not None:
            writer.add_scalar(f"{tag}/{name}", value, iteration)
    if measurement.scales:
        name = f"{tag}/scale_exponent"
        _add_histogram(writer, name, dict(measurement.scales), iteration)
        row = {"iteration": iteration, "name": name, "histogram": dict(measurement.scales)}
        with metrics.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")


def _add_histogram(writer: Any, name: str, counts: dict[int, int], iteration: int) -> None:
    """Add a bar of width 1 around each exponent, from the lowest to the highest."""
    exponents = range(min(counts), max(counts) + 1)
    writer.add_histogram_raw(
        name,
        min=exponents[0],
        max=exponents[-1],
        num=sum(counts.values()),
        sum=sum(e * n for e, n in counts.items()),
        sum_squares=sum(e * e * n for e, n in counts.items()),
        # Right edges; the first is of an empty bucket.
        bucket_limits=[exponents[0] - 0.5, *(e + 0.5 for e in exponents)],
        bucket_counts=[0, *(counts.get(e, 0) for e in exponents)],
        global_step=iteration,
    )
