"""Tables of how well every format represents a saved tensor, computed in a process with torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqo.errors import DataError, RunError
from mqo.program import ask

PROGRAM = "tools/tensor_stats.py"


@dataclass(frozen=True)
class TensorStats:
    """The tensors that a file holds, and the tables of the chosen ones.

    held: name, shape and dtype of each. tables: name, axis (of mx blocks), amax, and rows with the
    format's choices, sqnr_db (None without a signal; "inf" and "nan" as text) and, from 0 to 1,
    underflow (of the nonzero elements) and saturation.
    """

    held: tuple[dict[str, Any], ...]
    tables: tuple[dict[str, Any], ...]


def measure(
    tree: Path,
    file: Path,
    tensors: Sequence[str],
    axis: int | None,
    own: Mapping[str, Mapping[str, Any]] | None = None,
) -> TensorStats:
    """Measure those tensors of a safetensors file whose names match, with `tree`'s quantizers.

    Without `tensors` the file must have only one. `own` are the user's formats, rows of quant.toml.
    DataError if no tensor matches, or the choice is ambiguous.
    """
    if not file.is_file():
        raise DataError(f"{file} is not a file", expected="a safetensors file")
    options = [f"--tensor={glob}" for glob in tensors]
    options += [] if axis is None else [f"--axis={axis}"]
    options.append(f"--own={json.dumps(own or {})}")
    try:
        stats = TensorStats(**ask(tree / PROGRAM, [str(file)], after=options))
    except RunError as error:
        name = Path(PROGRAM).name
        raise RunError(f"{name} could not measure {file}: {error.found}") from error
    if stats.tables:
        return stats
    names = "".join(f"{t['name']}  {t['dtype']} {t['shape']}\n" for t in stats.held)
    meant = "matches " + " or ".join(tensors) if tensors else "was named"
    raise DataError(
        f"{file.name} holds {len(stats.held)} tensors, and none {meant}",
        expected="--tensor NAME, or a pattern such as 'fprop/*/x'",
        detail=names,
    )


def stats_lines(stats: TensorStats) -> list[str]:
    """Return one table per tensor: SQNR in dB, underflow of nonzero values and saturation in %."""
    text = []
    for table in stats.tables:
        amax = float(table["amax"])
        text.append(f"{table['name']}: blocks along axis {table['axis']}, amax {amax:.6g}")
        head = ("type", "block", "scale", "SQNR dB", "underflow %", "saturation %")
        width = max([6, *(len(_scale(row)) for row in table["rows"])])
        text.append("{:<15} {:>7} {:<{}} {:>8} {:>12} {:>12}".format(*head[:3], width, *head[3:]))
        text += [_row(row, width) for row in table["rows"]] or ["no float32, bfloat16 or float16"]
    return text


def _scale(row: dict[str, Any]) -> str:
    """Return the rule of the scale, or what has it."""
    return row["scale_rule"] or ("tensor" if row["tensor_scale"] else "-")


def _row(row: dict[str, Any], width: int) -> str:
    block = str(row["block"] or "-")
    block += f"x{block}" * (row["tile"] == "square")
    sqnr = row["sqnr_db"]
    shown = "-" if sqnr is None else f"{float(sqnr):.2f}"
    shares = f"{100 * row['underflow']:>12.4f} {100 * row['saturation']:>12.4f}"
    return f"{row['quant_type']:<15} {block:>7} {_scale(row):<{width}} {shown:>8} {shares}"
