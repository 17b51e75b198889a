"""Times attention on a CUDA device, forward and backward: the kernel with a PV type and its rivals.

    PYTHONPATH=Megatron-LM .venv/bin/python benchmarks/attention_gpu.py

One sequence of the heads of llama32-1b in bfloat16. "fused" has no types, "chunks" has PV's type in
torch's operations, "kernel" has it in Triton's. Without a device it runs in Triton's interpreter,
if TRITON_INTERPRET=1 says so, where the times mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from megatron.attention import Scores, Span, Visible, chunked_attention
from megatron.quant import OperandParts, QuantSpec
from quant_gpu import device, seconds
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

HEADS, GROUPS, WIDTH = 32, 8, 64


def main() -> None:
    """Measure, and print a row each length and type."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192])
    parser.add_argument("--types", nargs="+", default=["mxfp8", "nvfp4", "hif4"])
    given = parser.parse_args()
    try:
        from megatron.attention.gpu import kernel_attention
        from megatron.quant.gpu import INTERPRETED
    except ImportError:
        sys.exit("There is no Triton here.")
    if not (torch.cuda.is_available() or INTERPRETED):
        sys.exit("There is no CUDA device here.")
    print("| tokens | PV | fused, ms | chunks | kernel | kernel of fused | of chunks |")
    print("|---|---|---|---|---|---|---|")
    for length in given.lengths:
        tensors = operands(length)
        fused = timed(lambda *of: plain(*of), tensors)
        for quant_type in given.types:
            probs = parts(quant_type, length)
            chunks = timed(lambda *of, p=probs: in_chunks(*of, p), tensors)
            kernel = timed(
                lambda *of, p=probs: kernel_attention(*of, scores=scores(), probs=p), tensors
            )
            times = " | ".join(f"{1e3 * one:.2f}" for one in (fused, chunks, kernel))
            print(
                f"| {length} | {quant_type} | {times} | {kernel / fused:.2f} "
                f"| {kernel / chunks:.2f} |"
            )


def operands(length: int) -> list[Tensor]:
    """Return query, key and value, [s, 1, heads, width]."""
    options = {"device": device(), "dtype": torch.bfloat16, "requires_grad": True}
    return [torch.randn(length, 1, heads, WIDTH, **options) for heads in (HEADS, GROUPS, GROUPS)]


def scores() -> Scores:
    """Return their scale, and a softmax in float32."""
    return Scores(WIDTH**-0.5, None, torch.float32)


def parts(quant_type: str, length: int) -> OperandParts:
    """Return what quantizes the probabilities."""
    spec = QuantSpec(quant_type)
    amax = torch.ones((), device=device()) if spec.scales_by_tensor else None
    return OperandParts(("pv", "", "probs"), spec, (HEADS, length, length), None, amax)


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Run torch's own attention."""
    heads = [tensor.permute(1, 2, 0, 3) for tensor in (query, key, value)]
    found = scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    return found.permute(2, 0, 1, 3).flatten(2)


def in_chunks(query: Tensor, key: Tensor, value: Tensor, probs: OperandParts) -> Tensor:
    """Run attention in chunks of queries."""
    visible = Visible((Span(0, len(query), 0),))
    return chunked_attention(query, key, value, scores=scores(), probs=probs, visible=visible)


def timed(run: Callable[..., Tensor], tensors: list[Tensor]) -> float:
    """Return seconds of a forward and a backward pass."""
    grad = torch.randn_like(run(*tensors))
    return seconds(lambda: torch.autograd.grad(run(*tensors), tensors, grad))


if __name__ == "__main__":
    main()
