"""How well every format holds a saved tensor: what `mqo stats` prints.

Reads a file of safetensors, a run's dump or any other, and writes JSON to the file that its second
argument names: the tensors that the file holds, and for each chosen one a row a format, block and
scale rule. Needs torch and safetensors, and no Megatron beside its own tree's mqo/quant.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str]) -> None:
    """Measure the tensors that the arguments name."""
    # In the place of this folder, whose coverage.py numba would take for the package.
    sys.path[:1] = [str(ROOT / ".mqo_runtime"), str(ROOT)]
    args = parser().parse_args(argv)
    from mqo.megatron.run.errors import SavedError, leave, reading
    from mqo.quant.record import jsonable

    try:
        with reading():
            found = jsonable(measured_file(args))
    except SavedError as error:
        leave(error)
    args.target.write_text(json.dumps(found, allow_nan=False), encoding="utf-8")


def measured_file(args: argparse.Namespace) -> dict[str, Any]:
    """The tensors that the file holds, and the tables of those that are chosen."""
    from mqo.megatron.run.untrusted import open_safetensors

    with open_safetensors(args.file) as file:
        held = [
            {"name": name, "shape": part.get_shape(), "dtype": part.get_dtype()}
            for name in sorted(file.keys())
            for part in (file.get_slice(name),)
        ]
        chosen = [t["name"] for t in held if any(fnmatchcase(t["name"], g) for g in args.tensor)]
        if not args.tensor and len(held) == 1:
            chosen = [held[0]["name"]]
        tables = [table(name, file.get_tensor(name), args.axis) for name in chosen]
    return {"held": held, "tables": tables}


def parser() -> argparse.ArgumentParser:
    """Return the parser; without --tensor a file's only tensor is measured, none of several."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("file", type=Path)
    made.add_argument("target", type=Path)
    made.add_argument("--tensor", action="append", default=[], metavar="GLOB")
    made.add_argument("--axis", type=int, help="of mx blocks; by default a dumped operand's, or -1")
    return made


def table(name: str, x: Any, axis: int | None) -> dict[str, Any]:
    """Measure the rows of one tensor; a dtype that is not quantized gives none."""
    from mqo.quant.backend import DTYPES

    axis = axis_of(name) if axis is None else axis
    rows = list(measured(x, axis)) if x.dtype in DTYPES and x.dim() else []
    amax = x.abs().amax().item() if rows and x.numel() else 0.0
    return {"name": name, "axis": axis, "amax": amax, "rows": rows}


def axis_of(name: str) -> int:
    """Return the contraction axis of an operand dumped as site/layer/operand; else the last."""
    from mqo.quant.formats import SITES

    parts = name.split("/")
    site = SITES.get(parts[0])
    axes = {site.lhs: site.lhs_axis, site.rhs: site.rhs_axis} if site else {}
    return axes.get(parts[-1], -1)


def measured(x: Any, axis: int) -> Iterator[dict[str, Any]]:
    """Yield a row for every format and every choice that it has, each with its own rounding."""
    from mqo.quant.backend import fake_quantize
    from mqo.quant.measurement import Measurement, measure

    for spec in specs():
        own = asdict(spec) | ({} if spec.format.is_mx else {"scale_rule": None})
        sums = measure(x, fake_quantize(x, spec, axis=axis), spec, axis)
        found = Measurement.of(("", "", "", spec.quant_type), sums.flat().tolist())
        shares = {"underflow": found.underflow, "saturation": found.saturation}
        yield own | {"sqnr_db": found.sqnr_db} | shares


def specs() -> Iterator[Any]:
    """Yield every format with every choice of its own: block and scale rule, tensor scale, tile."""
    from mqo.quant.formats import BLOCK_SIZES, FORMATS, SCALE_RULES
    from mqo.quant.spec import QuantSpec

    for spec in map(QuantSpec, FORMATS):
        if spec.format.is_mx:
            choices = itertools.product(BLOCK_SIZES, SCALE_RULES)
            yield from (replace(spec, block=block, scale_rule=rule) for block, rule in choices)
            continue
        yield spec
        if spec.format.scale == "none":
            yield replace(spec, tensor_scale=True)
        if spec.format.square:
            yield replace(spec, tile="square")


if __name__ == "__main__":
    main(sys.argv[1:])
