"""Measure the error of each site's GEMM as a run computes it, for `mqo perf`.

    MQO_QUANT_CONFIG=RUN/quant.toml python Megatron-LM/tools/gemm_precision.py RUN/coverage.json OUT

For the largest product of each site in a run's coverage, it draws random operands, quantizes and
multiplies them as the patched source does, and compares the result with fp64: `total` with the
product of the drawn operands, `product` with that of the quantized operands, which is the error of
the multiplication itself. It imports only mqo/quant and mqo/megatron/device of its tree.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Remove this folder from the path: numba would import its coverage.py as the package.
    sys.path[:1] = [str(ROOT / ".mqo_runtime"), str(ROOT)]

import torch
from mqo.megatron.device import accelerator_type
from mqo.megatron.run.files import jsonable
from mqo.megatron.run.untrusted import read_json_object
from mqo.quant.formats import LINEAR, SITES
from mqo.quant.gemms import gemm_operands
from mqo.quant.products import with_alphas
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The error of an element depends only on k, so these numbers of rows, columns and heads suffice.
ROWS, HEADS = 256, 8
# Standard deviations of the operands: of initialized weights, and roughly of gradients.
SCALES = {"weight": 0.02, "grad": 1e-3, "ds": 1e-3}
# Operands [batch, queries, keys]; the others of attention have the batch as their second axis.
SCORES = ("probs", "ds")
SEED = 1234


def main(coverage: Path, target: Path) -> None:
    """Measure the sites of a run's coverage."""
    facts = read_json_object(coverage)
    rows = [measured(p, DTYPES[facts["dtype"]]) for p in largest(facts["products"])]
    table = {"dtype": facts["dtype"], "seed": SEED, "sites": rows}
    text = json.dumps(jsonable(table), indent=1, allow_nan=False)
    target.write_text(text, encoding="utf-8")


def largest(products: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return one product per site: the one with the most FLOPs, quantized ones first."""
    chosen: dict[str, Mapping[str, Any]] = {}
    for product in sorted(products, key=lambda p: (p["quant_type"] != "none", p["flops"])):
        chosen[product["gemm"]] = product
    return [chosen[site] for site in SITES if site in chosen]


def measured(product: Mapping[str, Any], dtype: torch.dtype, seed: int = SEED) -> dict[str, Any]:
    """Return a site's row: the sizes of the product, and both errors."""
    site, quant_type = product["gemm"], product["quant_type"]
    sizes = {"batch": min(product["batch"], HEADS), "k": product["k"]}
    sizes |= {name: min(product[name], ROWS) for name in ("m", "n")}
    drawn = operands(site, sizes, torch.Generator().manual_seed(seed))
    lhs, rhs = (part.to(accelerator_type(), dtype) for part in drawn)
    quantize = gemm_operands(site, quant_type, SimpleNamespace())
    alphas = quantize.separate_alphas()
    left, right = laid_out(site, quantize.lhs(lhs), quantize.rhs(rhs))
    got = with_alphas(torch.bmm if left.dim() == 3 else torch.matmul, alphas)(left, right)
    return {
        "site": site,
        "quant_type": quant_type,
        **sizes,
        "total": error(got, torch.matmul(*laid_out(site, lhs.double(), rhs.double()))),
        "product": error(got, left.double() @ right.double() * alphas.both),
    }


def operands(site: str, sizes: Mapping[str, int], source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw both operands, float32, in the layout in which the patched source passes them."""

    def draw(side: str, free: str) -> Tensor:
        name, axis = SITES[site].operand(side)
        shape = [sizes[size] for size in ((free, "k") if axis == -1 else ("k", free))]
        if SITES[site].layer != LINEAR:
            shape.insert(0 if name in SCORES else 1, sizes["batch"])
        numbers = torch.randn(*shape, generator=source)
        return numbers.softmax(-1) if name == "probs" else numbers * SCALES.get(name, 1.0)

    return draw("lhs", "m"), draw("rhs", "n")


def laid_out(site: str, lhs: Tensor, rhs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the operands as the patched source passes them to the product."""

    def matrices(side: str, tensor: Tensor) -> Tensor:
        name, axis = SITES[site].operand(side)
        if tensor.dim() == 3 and name not in SCORES:
            tensor = tensor.transpose(0, 1)
        return tensor.mT if (axis == -1) == (side == "rhs") else tensor

    return matrices("lhs", lhs), matrices("rhs", rhs)


def error(got: Tensor, exact: Tensor) -> dict[str, float]:
    """Return errors in ULP of got's dtype, relative (Frobenius), and SQNR in dB, inf if exact."""
    distance = (got.double() - exact).abs()
    ulps = distance / spacing(exact, got.dtype)
    relative = (distance.norm() / exact.norm()).item()
    sqnr = -20 * math.log10(relative) if relative else math.inf
    return {
        "max_ulp": ulps.max().item(),
        "mean_ulp": ulps.mean().item(),
        "relative_error": relative,
        "sqnr_db": sqnr,
    }


def spacing(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance of neighboring values of `dtype` at each value of `exact`, float64."""
    facts = torch.finfo(dtype)
    _, exponent = torch.frexp(exact)  # |exact| = mantissa * 2^exponent, mantissa in [0.5, 1)
    power = torch.ldexp(torch.full_like(exact, 0.5), exponent)
    return power.where(exact != 0, 0.0).clamp(min=facts.smallest_normal) * facts.eps


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
