"""Measure how well every format represents a saved tensor, for `mqo stats`.

It needs torch and safetensors, and imports only mqo/quant of its tree.
"""

import itertools
from collections.abc import Iterator
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mqo.megatron.run.errors import reading
from mqo.megatron.run.files import jsonable
from mqo.megatron.run.untrusted import open_safetensors
from mqo.quant.backend import DTYPES
from mqo.quant.comparison import error_of
from mqo.quant.formats import BLOCK_SIZES, FORMATS, SITES
from mqo.quant.own_formats import FormatRow
from mqo.quant.spec import QuantSpec


def measure(
    file: Path, tensors: list[str], axis: int | None, own: dict[str, FormatRow]
) -> dict[str, Any]:
    """Return the tensors in a file of safetensors, such as a run's dump, and tables of some.

    A table has a row per format, block and scale rule. `tensors` are globs; without any, a file is
    measured only if it has a single tensor. `axis` is that of blocks, by default a dumped
    operand's, or -1. `own` are the formats of the user.
    """
    for name, row in own.items():
        row.declare(name)
    with reading():
        return jsonable(measured_file(file, tensors, axis))


def measured_file(path: Path, globs: list[str], axis: int | None) -> dict[str, Any]:
    """Return what `measure` does."""
    with open_safetensors(path) as file:
        held = [
            {"name": name, "shape": part.get_shape(), "dtype": part.get_dtype()}
            for name in sorted(file.keys())
            for part in (file.get_slice(name),)
        ]
        chosen = [t["name"] for t in held if any(fnmatchcase(t["name"], g) for g in globs)]
        if not globs and len(held) == 1:
            chosen = [held[0]["name"]]
        tables = [table(name, file.get_tensor(name), axis) for name in chosen]
    return {"held": held, "tables": tables}


def table(name: str, x: Any, axis: int | None) -> dict[str, Any]:
    """Return the table rows of one tensor: none if its dtype cannot be quantized."""
    axis = axis_of(name) if axis is None else axis
    rows = list(measured(x, axis)) if x.dtype in DTYPES and x.dim() else []
    amax = x.abs().amax().item() if rows and x.numel() else 0.0
    return {"name": name, "axis": axis, "amax": amax, "rows": rows}


def axis_of(name: str) -> int:
    """Return the contraction axis of an operand dumped as site/layer/operand; else the last."""
    parts = name.split("/")
    site = SITES.get(parts[0])
    axes = {site.lhs: site.lhs_axis, site.rhs: site.rhs_axis} if site else {}
    return axes.get(parts[-1], -1)


def measured(x: Any, axis: int) -> Iterator[dict[str, Any]]:
    """Yield a row for every format and each of its choices, with the format's default rounding."""
    for spec in specs():
        own = asdict(spec) | {"scale_rule": spec.rule_text or None}
        measurement = error_of(x, spec, axis=axis).measurement
        shares = {"underflow": measurement.underflow, "saturation": measurement.saturation}
        yield own | {"sqnr_db": measurement.sqnr_db} | shares


def specs() -> Iterator[Any]:
    """Yield every format with each of its choices: block and scale rule, tensor scale, tile."""
    for spec in map(QuantSpec, FORMATS):
        if spec.format.is_mx:
            choices = itertools.product(BLOCK_SIZES, spec.format.scale_rules)
            yield from (replace(spec, block=block, scale_rule=rule) for block, rule in choices)
            continue
        yield spec
        if spec.format.scale == "none":
            yield replace(spec, tensor_scale=True)
        others = [replace(spec, scale_rule=rule) for rule in spec.format.scale_rules[1:]]
        yield from others
        if spec.format.square:
            yield from (replace(each, tile="square") for each in (spec, *others))
