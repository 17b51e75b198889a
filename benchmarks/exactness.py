"""Count the outputs of bf16 and fp16 GEMMs that equal an exact model of them.

    .venv/bin/python benchmarks/exactness.py [--hidden 1024] [--sequence 4096]
    .venv/bin/python benchmarks/exactness.py --losses SEEDS
    .venv/bin/python benchmarks/exactness.py --steps PAIRS --dtype fp32

The model multiplies the quantized operands without their alphas in float64, multiplies by alpha,
and rounds once. The first table has drawn operands; "rounded" are operands that include alpha and
are rounded to the dtype, as before version 0.3. The second table has the products of the first
step of a training, stored by observed/sitecustomize.py. With --losses, it instead trains in bf16
with both kinds of operands, for each seed, and prints the validation losses. With --steps it trains
in pairs, and prints the ratio of their median steps, of new to old products.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from gemm_data import DATA
from mqo.launch.config import resolve
from mqo.perf.ratio import median_step, quartiles
from mqo.quant.gemms import gemm_operands
from mqo.runs import STEP_TIME, VALID_LOSS
from step import STEPS, UNFUSED, Variant, configured, trained
from torch import Tensor

KINDS = ("nvfp4", "fp8_tensor_e4m3", "fp8_tensor_e5m2")
LENGTHS = (1024, 4096)
TOKENS, OUTPUTS = 1024, 512
SEED = 1234
MODE = "nvfp4"


def main() -> None:
    """Print both tables, or the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--losses", type=int, default=0, metavar="SEEDS")
    parser.add_argument("--steps", type=int, default=0, metavar="PAIRS")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    given = parser.parse_args()
    if given.losses:
        print_losses(given.losses)
        return
    if given.steps:
        print_steps(given)
        return
    print_drawn()
    print_trained(given)


def print_drawn() -> None:
    """Print the shares of equal outputs for drawn operands, the smallest over LENGTHS."""
    print(
        "| dtype | format | data | rounded operands | alpha in the product |\n|---|---|---|---|---|"
    )
    for dtype in (torch.bfloat16, torch.float16):
        for kind in KINDS:
            for name, draw in DATA.items():
                torch.manual_seed(SEED)
                pairs = [draw(TOKENS, OUTPUTS, length) for length in LENGTHS]
                cells = [
                    share(min(equal(kind, dtype, *pair, alphas=alphas) for pair in pairs))
                    for alphas in (False, True)
                ]
                print(f"| {str(dtype)[6:]} | `{kind}` | {name} | {' | '.join(cells)} |")


def equal(kind: str, dtype: torch.dtype, a: Tensor, b: Tensor, *, alphas: bool) -> float:
    """Return the share of the outputs of fprop that equal the exact model."""
    a, b = a.to(dtype), b.to(dtype)
    operands = gemm_operands("fprop", kind, SimpleNamespace())
    multiply = operands.product(torch.matmul) if alphas else torch.matmul
    result = multiply(operands.lhs(a), operands.rhs(b).t())
    operands = gemm_operands("fprop", kind, SimpleNamespace())
    factors = operands.separate_alphas()
    return as_model(operands.lhs(a), operands.rhs(b).t(), factors.both, result)


def as_model(left: Tensor, right: Tensor, alpha: float, result: Tensor) -> float:
    """Return the share of a product's elements that equal the exact model."""
    exact = (left.double() @ right.double()) * alpha
    return (exact.to(result.dtype) == result).double().mean().item()


def share(part: float) -> str:
    """Format a share in %."""
    return f"{100 * part:.3f} %"


# -- a training ------------------------------------------------------------------------------------


def products(chosen: str) -> AbstractContextManager[Any]:
    """Set MQO_PRODUCTS, and make Python import observed/sitecustomize.py, in processes."""
    folder = str(Path(__file__).parent / "observed")
    return patch.dict(os.environ, MQO_PRODUCTS=chosen, PYTHONPATH=folder)


def print_trained(given: argparse.Namespace) -> None:
    """Print the shares of equal outputs for each site of a training in bf16."""
    sizes = argparse.Namespace(**vars(given), layers=1)
    variant = Variant(MODE, flags=UNFUSED, gemms="all")
    with tempfile.TemporaryDirectory() as folder, products(folder):
        trained(configured(variant, sizes, batch=1, steps=1))
        print("\n| site | layer | K | outputs | alpha in the product |\n|---|---|---|---|---|")
        for path in sorted(Path(folder).glob("*.pt")):
            site, layer = path.stem.split()
            kept = torch.load(path, weights_only=True)
            equals = as_model(kept["left"], kept["right"], kept["alpha"], kept["result"])
            cells = (site, layer, kept["left"].shape[-1], kept["result"].numel(), share(equals))
            print(f"| {' | '.join(map(str, cells))} |")


def print_losses(seeds: int) -> None:
    """Print the validation loss of each seed with rounded operands, and with alpha in products."""
    print("| seed | rounded operands | alpha in the product |\n|---|---|---|")
    for seed in range(seeds):
        config = resolve(
            *("llama32-1b", "wikipedia", "linear_nvfp4", "smoke"),
            dtype="bf16",
            gemms="all",
            extra_flags=("--seed", str(SEED + seed)),
        )
        cells = []
        for chosen in ("rounded", ""):
            with products(chosen):
                losses = trained(config).read_metrics()[VALID_LOSS]
                cells.append(f"{losses[-1][1]:.5f}")
        print(f"| {SEED + seed} | {' | '.join(cells)} |", flush=True)


def print_steps(given: argparse.Namespace) -> None:
    """Print the ratio of the steps of each pair, and their median and quartiles."""
    sizes, ratios = argparse.Namespace(**vars(given), layers=1), []
    config = configured(Variant(MODE, gemms="all"), sizes, batch=1, steps=STEPS)
    for _ in range(given.steps):
        seconds = {}
        for chosen in ("old", ""):
            with products(chosen):
                steps = dict(trained(config).read_metrics()[STEP_TIME])
            seconds[chosen] = median_step(steps)
        ratios.append(seconds[""] / seconds["old"])
        print(f"{seconds['old']:.3f} s, {seconds['']:.3f} s: {ratios[-1]:.3f}", flush=True)
    ratio = quartiles(ratios)
    print(f"new / old: {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})")


if __name__ == "__main__":
    main()
