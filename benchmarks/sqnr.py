"""Measure the SQNR of every format on four kinds of data, on the CPU.

    .venv/bin/python benchmarks/sqnr.py                  # every format, also with squares
    .venv/bin/python benchmarks/sqnr.py --scale-rules    # the scale rules of mxfp4 and mxfp8

Tensors are float32 [1024, 4096], drawn with seed 1234. Blocks run along the last axis, whose
positions are called channels here. Every format has its default options.
"""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributions import Laplace, Normal, StudentT

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "Megatron-LM"))

from gemm_data import EVERY, FACTOR, WHICH
from mqo.quant.backend import fake_quantize
from mqo.quant.formats import FORMATS, SCALE_RULES_OF
from mqo.quant.spec import QuantSpec

SHAPE = (1024, 4096)
SEED = 1234


def main() -> None:
    """Print the table, and the date and machine of the measurement."""
    data = tensors()
    if "--scale-rules" in sys.argv[1:]:
        print_scale_rules({title: x for title, x, part in data.values() if isinstance(part, slice)})
    else:
        print_formats(data)
    today = datetime.date.today().isoformat()
    print(f"\n({today}, {platform.machine()}, {os.cpu_count()} CPUs, torch {torch.__version__})")


def print_formats(data: Mapping[str, tuple[str, Tensor, slice | Tensor]]) -> None:
    """Print a row per format."""
    titles = {name: f"{title}, dB" for name, (title, _, _) in data.items()}
    print(f"| format | {' | '.join(titles.values())} |")
    print(f"|---|{'---|' * len(titles)}")
    for label, spec in specs():
        cells = (f"{sqnr(x, spec, part):.1f}" for _, x, part in data.values())
        print(f"| {label} | {' | '.join(cells)} |")


def print_scale_rules(data: Mapping[str, Tensor]) -> None:
    """Print a row per mx format and distribution, and a column per scale rule."""
    rules = SCALE_RULES_OF["e8m0"]
    print(f"| format | data | {' | '.join(f'`{rule}`' for rule in rules)} |")
    print(f"|---|---|{'---|' * len(rules)}")
    for kind in ("mxfp4", "mxfp8"):
        for title, x in data.items():
            specs = (QuantSpec(kind, scale_rule=rule) for rule in rules)
            cells = (f"{sqnr(x, spec, slice(None)):.2f}" for spec in specs)
            print(f"| {kind} | {title} | {' | '.join(cells)} |")


def tensors() -> dict[str, tuple[str, Tensor, slice | Tensor]]:
    """Return a title, a tensor and the channels to measure, for each kind of data."""
    data = {}
    distributions = {"N(0, 1)": Normal(0.0, 1.0), "Laplace(0, 1)": Laplace(0.0, 1.0)}
    for name, distribution in (distributions | {"Student-t(3)": StudentT(3.0)}).items():
        torch.manual_seed(SEED)
        data[name] = (name, distribution.sample(SHAPE), slice(None))
    outlier = torch.arange(SHAPE[1]) % EVERY == WHICH
    x = torch.where(outlier, FACTOR, 1.0) * data["N(0, 1)"][1]
    data["all"] = ("an outlier channel", x, slice(None))
    data["others"] = ("its other channels", x, ~outlier)
    return data


def specs() -> Iterator[tuple[str, QuantSpec]]:
    """Yield every format, also with square tiles, a tensor scale, or rules of two levels."""
    for kind, row in FORMATS.items():
        spec = QuantSpec(kind)
        yield f"`{kind}`", spec
        if row.square:
            yield f"`{kind}`, {row.block} x {row.block}", replace(spec, tile="square")
        for rule in row.scale_rules[1:] if row.scale == "two-level" else ():
            yield f"`{kind}`, {rule}", replace(spec, scale_rule=rule)
        if row.scale == "none":
            yield f"`{kind}`, tensor scale", replace(spec, tensor_scale=True)


def sqnr(x: Tensor, spec: QuantSpec, channels: slice | Tensor) -> float:
    """Return the SQNR in dB over these channels, after quantizing all of x."""
    error = (fake_quantize(x, spec) - x)[:, channels].double()
    return 10 * (x[:, channels].double().square().sum() / error.square().sum()).log10().item()


if __name__ == "__main__":
    main()
