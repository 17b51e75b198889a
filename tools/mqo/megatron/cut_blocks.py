"""Finds blocks that a parallel layout would cut in two, before the first step.

A block extends along the axis that its GEMM sums over, and a square also along the operand's other
axis. If a layout splits such an axis over ranks, it must split between blocks. Otherwise the blocks
of a rank differ from those of a single process.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mqo.megatron import linear
from mqo.megatron.layers import FoundLayer
from mqo.megatron.traps import IsExcluded, listed
from mqo.quant.formats import LINEAR

_FEATURES = "another --tensor-model-parallel-size (for experts --expert-tensor-parallel-size)"
_TOKENS = "another --context-parallel-size, --seq-length or --micro-batch-size"


@dataclass(frozen=True)
class _Cut:
    """What a split cuts: the sums of site `sums`, and squares of `operands`, SITE.OPERAND each."""

    sums: str
    operands: tuple[str, ...]


# What a split of a linear layer cuts.
_SPLIT = {
    linear.ROW: _Cut("fprop", ("dgrad.weight", "wgrad.x")),
    linear.COLUMN: _Cut("dgrad", ("fprop.weight", "wgrad.grad")),
}
_CHUNKS = _Cut("wgrad", ("fprop.x", "dgrad.grad"))


def cut_blocks(
    blocks: Mapping[str, int],
    squares: Mapping[str, int],
    found: Iterable[FoundLayer],
    chunk_tokens: int,
    is_excluded: IsExcluded,
) -> list[str]:
    """Say, one text a fault, what this rank has a part of that is cut in a block.

    Args:
        blocks: of each site that quantizes in blocks, how long they are.
        squares: of each operand (SITE.OPERAND) that is quantized in squares, their side.
        found: this rank's layers.
        chunk_tokens: tokens of a micro-batch in one context-parallel chunk; 0 without chunks.
        is_excluded: whether the run leaves (site, layer) unquantized.
    """
    cut: dict[tuple[str, int, int, int], list] = {}
    for layer, module, _ in found:
        side, (part, whole) = linear.side(module), linear.split_size(module) or (0, 0)
        if layer.kind != LINEAR or part == whole or side is None:
            continue
        # Gate and up are concatenated, and each is split.
        pieces = 2 if layer.name.endswith("linear_fc1") and _gated(module) else 1
        for site, block in _through(_SPLIT[side], blocks, squares):
            if part // pieces % block and not is_excluded(site, layer.name):
                key = (site, part // pieces, whole // pieces, block)
                cut.setdefault(key, []).append(layer)
    faults = [
        f"{site}: a rank has {part} of the {whole} elements of {listed(layers)} along which "
        f"blocks lie, no multiple of the block of {block}: {_FEATURES}, a smaller block, or an "
        "exclude"
        for (site, part, whole, block), layers in cut.items()
    ]
    return faults + [
        f"{site}: a context-parallel chunk of a micro-batch has {chunk_tokens} tokens, no "
        f"multiple of the block of {block}: {_TOKENS}"
        for site, block in _through(_CHUNKS, blocks, squares)
        if chunk_tokens % block
    ]


def _through(
    cuts: _Cut, blocks: Mapping[str, int], squares: Mapping[str, int]
) -> Iterable[tuple[str, int]]:
    """Yield each site whose blocks cross a split, and the block size."""
    if cuts.sums in blocks:
        yield cuts.sums, blocks[cuts.sums]
    for operand in cuts.operands:
        if operand in squares:
            yield operand.partition(".")[0], squares[operand]


def _gated(module: object) -> bool:
    return bool(getattr(getattr(module, "config", None), "gated_linear_unit", False))
