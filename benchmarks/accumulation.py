"""Compare the error of accumulating a GEMM's products with the error of quantizing its operands.

    .venv/bin/python benchmarks/accumulation.py [--threads 2] [--quick]

Prints tables, measured on the CPU. The GEMM is [tokens, K] times [outputs, K] transposed. Every
accumulation method multiplies the same quantized operands and is compared with their float64
product. Errors are computed on a sample of the output, its first rows and columns; torch's own
GEMMs compute the full output. accumulators.py describes the simulated hardware.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from mqo.quant.products import matmul
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "Megatron-LM"))

from accumulators import BF16, BLACKWELL_FP8, HOPPER_FP8, TensorCore, in_blocks, tensor_core
from gemm_data import DATA, Draw, Operand, quantize
from timing import options

KINDS = (
    "none",
    "mxfp8",
    "fp8_tensor_e4m3",
    "fp8_block",
    "fp8_block_fp32",
    "mxfp4",
    "nvfp4",
    "hif4",
)
SEED = 1234
# Products that DeepSeek-V3 sums before it adds the sum to a float32 accumulator.
PROMOTION = 128
LEAST = 0.001  # smallest ratio, in %, that is printed as a number


@dataclass(frozen=True)
class Size:
    """The sizes of the GEMMs: values of K, and the sides of the output and of its sample."""

    lengths: tuple[int, ...]
    tokens: int
    outputs: int
    sample: int


FULL = Size((1024, 4096, 14336), tokens=2048, outputs=1024, sample=128)
QUICK = Size((1024,), tokens=256, outputs=128, sample=32)


@dataclass(frozen=True)
class Error:
    """The error of a product against the exact one.

    sqnr: in dB. largest: the largest error divided by the RMS of the exact product. noise: the RMS
    error. gain: the relative change in magnitude, by least squares; negative if it shrinks.
    """

    sqnr: float
    largest: float
    noise: float
    gain: float


Key = tuple[int, str]  # length of the sum, format
Errors = dict[str, Error]  # of quantization, and of each accumulation method


def main() -> None:
    """Measure, and print the tables."""
    parser = options(__doc__, threads=2)
    parser.add_argument("--quick", action="store_true", help="one small GEMM per kind of data")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    size, start = QUICK if arguments.quick else FULL, time.perf_counter()
    results = {data: dict(measure(draw, size)) for data, draw in DATA.items()}
    print(f"{arguments.threads} threads on {os.cpu_count()} {platform.machine()} CPUs, ", end="")
    print(f"torch {torch.__version__}, {time.perf_counter() - start:.0f} s")
    print_ratios(results)
    print_gains(results)
    for data, rows in results.items():
        print_errors(data, rows)


def measure(draw: Draw, size: Size) -> Iterator[tuple[Key, Errors]]:
    """Yield the errors of all accumulation methods for each K and format."""
    for length in size.lengths:
        torch.manual_seed(SEED)
        originals = draw(size.tokens, size.outputs, length)
        unquantized = exact_product(*(x[: size.sample] for x in originals))
        for kind in KINDS:
            a, b = (quantize(x, kind, size.sample) for x in originals)
            product = exact_product(a.sample, b.sample) * (a.alpha * b.alpha)
            errors = {"quantization": error(product, unquantized)}
            for name, method in METHODS.items():
                result = method(a, b)
                if result is not None:
                    errors[name] = error(result[: size.sample, : size.sample], product)
            yield (length, kind), errors


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a [M, K] times b [N, K] transposed, computed in float64."""
    return a.double() @ b.double().T


def error(product: Tensor, exact: Tensor) -> Error:
    """Return the error of a product [M, N] against the exact float64 one."""
    wrong = product.double() - exact
    noise, rms = (x.square().mean().sqrt().item() for x in (wrong, exact))
    sqnr = 20 * math.log10(rms / noise) if noise else math.inf
    gain = (wrong * exact).mean().item() / rms**2
    return Error(sqnr, wrong.abs().max().item() / rms, noise, gain)


# -- accumulation methods: each returns [M, N], full or of the samples; None if not in hardware ----


def fp32_gemm(a: Operand, b: Operand) -> Tensor:
    """Multiply in float32, with torch's GEMM."""
    return matmul(a.whole, b.whole.T, a.alpha * b.alpha)


def bf16_gemm(a: Operand, b: Operand) -> Tensor:
    """Multiply in bfloat16, with torch's GEMM: bfloat16 operands and result."""
    return matmul(a.whole.bfloat16(), b.whole.bfloat16().T, a.alpha * b.alpha)


def bf16_operands(a: Operand, b: Operand) -> Tensor:
    """Round only the operands to bfloat16."""
    return exact_product(a.sample.bfloat16(), b.sample.bfloat16()) * (a.alpha * b.alpha)


def fp32_in_order(a: Operand, b: Operand) -> Tensor:
    """Sum blocks of 128 products, and add the sums in float32, in order."""
    return in_blocks(a.sample, b.sample, PROMOTION, fp32_sum) * (a.alpha * b.alpha)


def scales_on_sums(a: Operand, b: Operand) -> Tensor | None:
    """Sum the products of each block in float32, and multiply the sums by the scales."""
    if a.spec.quant_type == "none":
        return None
    left, right = (x.elements.float() for x in (a, b))
    scales = (a.scales, b.scales)
    return in_blocks(left, right, a.block, fp32_sum, scales) * (a.alpha * b.alpha)


def in_tensor_core(a: Operand, b: Operand, core: TensorCore) -> Tensor | None:
    """Sum all products in one accumulator, with block scales; apply tensor scales last."""
    if a.has_long_scales:
        return None
    return tensor_core(a.sample.double(), b.sample.double(), core) * (a.alpha * b.alpha)


def in_wide_accumulator(a: Operand, b: Operand) -> Tensor | None:
    """Sum all products in a float32 accumulator, with addends of 26 bits."""
    return in_tensor_core(a, b, BF16 if a.spec.quant_type == "none" else BLACKWELL_FP8)


def in_narrow_accumulator(a: Operand, b: Operand) -> Tensor | None:
    """Sum all products in an accumulator of 14 bits."""
    return in_tensor_core(a, b, HOPPER_FP8)


def promoted(a: Operand, b: Operand) -> Tensor:
    """Sum 128 products in an accumulator of 14 bits, and add these sums in float32."""
    multiply = partial(tensor_core, core=HOPPER_FP8)
    if a.has_long_scales:
        return in_blocks(a.elements, b.elements, PROMOTION, multiply, (a.scales, b.scales))
    left, right = a.sample.double(), b.sample.double()
    return in_blocks(left, right, PROMOTION, multiply) * (a.alpha * b.alpha)


def fp32_sum(a: Tensor, b: Tensor) -> Tensor:
    """Return float32 a [M, K] times b [N, K] transposed, summed by torch."""
    return a @ b.T


METHODS: dict[str, Callable[[Operand, Operand], Tensor | None]] = {
    "fp32 GEMM": fp32_gemm,
    "bf16 GEMM": bf16_gemm,
    "bf16 operands": bf16_operands,
    "fp32 by 128": fp32_in_order,
    "scales on sums": scales_on_sums,
    "26 bits": in_wide_accumulator,
    "14 bits": in_narrow_accumulator,
    "14 bits by 128": promoted,
}


# -- the tables ------------------------------------------------------------------------------------


def print_ratios(results: dict[str, dict[Key, Errors]]) -> None:
    """Print the largest error over K of each method, relative to the quantization error."""
    print("\nRMS error in % of the quantization error, maximum over K:\n")
    print_header("data", "format", *METHODS)
    for data, rows in results.items():
        for kind in KINDS:
            cells = (ratio(every_length(rows, kind, method)) for method in METHODS)
            print(f"| {data} | {label(kind)} | {' | '.join(cells)} |")


def every_length(rows: dict[Key, Errors], kind: str, method: str) -> list[tuple[Error, Error]]:
    """Return the errors of a method and of quantization, for each K that has the method."""
    of_kind = [errors for (_, name), errors in rows.items() if name == kind]
    return [(errors[method], errors["quantization"]) for errors in of_kind if method in errors]


def ratio(pairs: list[tuple[Error, Error]]) -> str:
    """Format the largest noise ratio of the pairs, in %."""
    if not pairs:
        return "-"
    percent = 100 * max(error.noise / base.noise for error, base in pairs)
    if 0 < percent < LEAST:
        return f"< {LEAST}"
    return f"{percent:.2g}" if percent < 100 else f"{percent:,.0f}"


def print_gains(results: dict[str, dict[Key, Errors]]) -> None:
    """Print by how much each method shrinks or enlarges the output."""
    print("\nChange in output magnitude in %, maximum over K and formats:\n")
    print_header("data", *METHODS)
    for data, rows in results.items():
        gains = ([errors[m].gain for errors in rows.values() if m in errors] for m in METHODS)
        cells = (f"{100 * max(values, key=abs):.3f}" for values in gains)
        print(f"| {data} | {' | '.join(cells)} |")


def print_errors(data: str, rows: dict[Key, Errors]) -> None:
    """Print SQNR and largest error for one kind of data."""
    print(f"\n{data}: SQNR in dB (largest error in % of the output RMS)\n")
    columns = ("quantization", *METHODS)
    print_header("K", "format", *columns)
    for (length, kind), errors in rows.items():
        cells = (cell(errors.get(name)) for name in columns)
        print(f"| {length} | {label(kind)} | {' | '.join(cells)} |")


def cell(error: Error | None) -> str:
    """Format an error as a table cell."""
    if error is None:
        return "-"
    return f"{error.sqnr:.1f} ({100 * error.largest:.2g})" if error.noise else "exact"


def print_header(*titles: str) -> None:
    """Print the header of a table."""
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")


def label(kind: str) -> str:
    """Return the name of a format in tables."""
    return "bf16 (unquantized)" if kind == "none" else f"`{kind}`"


if __name__ == "__main__":
    main()
