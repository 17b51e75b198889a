"""How exact the GEMM of each site is, as a run multiplies it: `mqo perf` judges it.

    MQO_QUANT_CONFIG=RUN/quant.toml python Megatron-LM/tools/gemm_precision.py RUN/coverage.json OUT

Takes the largest product of each site from a run's coverage, draws its operands, hands them to
what the patched source calls, multiplies them as it does, and compares with fp64: `total` with the
product of the operands as they were drawn, `product` with that of the operands as the quantizer
left them, which is what the multiplication alone adds. Needs nothing of Megatron but mqo/quant
and mqo/megatron/device of its own tree.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The error of an element depends on k alone: so many rows, columns and heads show it.
ROWS, HEADS = 256, 8
# Standard deviations of what is drawn: of weights as they begin, of the rest as it roughly is.
WEIGHT, GRAD = 0.02, 1e-3
SEED = 1234


def main(coverage: Path, target: Path) -> None:
    """Measure the sites of a run's coverage."""
    # In the place of this folder, whose coverage.py numba would take for the package.
    sys.path[:1] = [str(ROOT / ".mqo_runtime"), str(ROOT)]
    from mqo.megatron.run.untrusted import read_json_object
    from mqo.quant.record import jsonable

    facts = read_json_object(coverage)
    rows = [measured(p, DTYPES[facts["dtype"]]) for p in largest(facts["products"])]
    table = {"dtype": facts["dtype"], "seed": SEED, "sites": rows}
    text = json.dumps(jsonable(table), indent=1, allow_nan=False)
    target.write_text(text, encoding="utf-8")


def largest(products: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a product a site: that of most FLOPs, of those that are quantized if any is."""
    from mqo.quant.formats import SITES

    found: dict[str, Mapping[str, Any]] = {}
    for product in sorted(products, key=lambda p: (p["quant_type"] != "none", p["flops"])):
        found[product["gemm"]] = product
    return [found[site] for site in SITES if site in found]


def measured(product: Mapping[str, Any], dtype: torch.dtype, seed: int = SEED) -> dict[str, Any]:
    """Measure a site's row: the sizes that were multiplied, and both errors."""
    from mqo.megatron.device import accelerator_type
    from mqo.quant.gemms import gemm_operands

    site, quant_type = product["gemm"], product["quant_type"]
    sizes = {"batch": min(product["batch"], HEADS), "k": product["k"]}
    sizes |= {name: min(product[name], ROWS) for name in ("m", "n")}
    drawn = operands(site, sizes, torch.Generator().manual_seed(seed))
    lhs, rhs = (part.to(accelerator_type(), dtype) for part in drawn)
    quantize = gemm_operands(site, quant_type, SimpleNamespace())
    left, right = quantize.lhs(lhs), quantize.rhs(rhs)
    got = multiply(site, left, right)
    return {
        "site": site,
        "quant_type": quant_type,
        **sizes,
        "total": error(got, multiply(site, lhs.double(), rhs.double())),
        "product": error(got, multiply(site, left.double(), right.double())),
    }


def operands(site: str, sizes: Mapping[str, int], source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw both operands, float32, in the layout that the patched source hands to the site."""
    b, m, n, k = (sizes[name] for name in ("batch", "m", "n", "k"))

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=source) * scale

    match site:
        case "fprop":
            return draw(m, k), draw(n, k, scale=WEIGHT)
        case "dgrad":
            return draw(m, k, scale=GRAD), draw(k, n, scale=WEIGHT)
        case "wgrad":
            return draw(k, m, scale=GRAD), draw(k, n)
        case "qk":
            return draw(m, b, k), draw(n, b, k)
        case "pv":
            return draw(b, m, k).softmax(-1), draw(k, b, n)
    raise ValueError(f"there is no site {site}")


def multiply(site: str, lhs: Tensor, rhs: Tensor) -> Tensor:
    """Compute the site's product, by the operation that the patched source runs."""
    match site:
        case "fprop":
            return torch.matmul(lhs, rhs.t())
        case "dgrad":
            return lhs.matmul(rhs)
        case "wgrad":
            return lhs.t().matmul(rhs)
        case "qk":
            return torch.bmm(lhs.transpose(0, 1), rhs.transpose(0, 1).transpose(1, 2))
    return torch.bmm(lhs, rhs.transpose(0, 1))


def error(got: Tensor, exact: Tensor) -> dict[str, float]:
    """Return ULP of got's dtype at the exact magnitude; Frobenius; SQNR in dB, inf if exact."""
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
    """Return the distance of neighboring values of `dtype` at each of `exact`, float64."""
    facts = torch.finfo(dtype)
    _, exponent = torch.frexp(exact)  # |exact| = mantissa * 2^exponent, mantissa in [0.5, 1)
    power = torch.ldexp(torch.full_like(exact, 0.5), exponent)
    return power.where(exact != 0, 0.0).clamp(min=facts.smallest_normal) * facts.eps


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
