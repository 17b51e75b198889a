"""Find quantization blocks that a parallel layout would split, before the first step.

A block extends along the axis that its GEMM sums over, and a square also along the operand's other
axis. If a layout splits such an axis over ranks, it must split between blocks. Otherwise the blocks
of a rank differ from those of a single process.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mqo.megatron import linear
from mqo.megatron.layers import FoundLayer
from mqo.megatron.traps import IsExcluded, listed
from mqo.quant.formats import ATTENTION, LINEAR, SITES

_FEATURES = "another --tensor-model-parallel-size (for experts --expert-tensor-parallel-size)"
_TOKENS = "another --context-parallel-size, --seq-length or --micro-batch-size"


@dataclass(frozen=True)
class _Cut:
    """The blocks that a split cuts: those of site `sums`, and squares of SITE.OPERAND names."""

    sums: str
    operands: tuple[str, ...]


_SPLIT = {
    linear.ROW: _Cut("fprop", ("dgrad.weight", "wgrad.x")),
    linear.COLUMN: _Cut("dgrad", ("fprop.weight", "wgrad.grad")),
}
_CHUNKS = _Cut("wgrad", ("fprop.x", "dgrad.grad"))


def cut_blocks(
    blocks: Mapping[str, int],
    squares: Mapping[str, int],
    found_layers: Iterable[FoundLayer],
    chunk_tokens: int,
    is_excluded: IsExcluded,
) -> list[str]:
    """Return one text per layer of this rank whose split falls inside a quantization block.

    Args:
        blocks: {site: block size} of the sites that quantize in blocks.
        squares: {SITE.OPERAND: side} of the operands that are quantized in squares.
        found_layers: this rank's layers.
        chunk_tokens: tokens of a micro-batch in one context-parallel chunk; 0 without chunks.
        is_excluded: whether the run leaves (site, layer) unquantized.
    """
    cut: dict[tuple[str, int, int, int], list] = {}
    for layer, module, _ in found_layers:
        side, (part, whole) = linear.side(module), linear.split_size(module) or (0, 0)
        if layer.kind != LINEAR or part == whole or side is None:
            continue
        for site, block in _through(_SPLIT[side], blocks, squares):
            size = next((size for size in _parts(layer.name, module, part) if size % block), 0)
            if size and not is_excluded(site, layer.name):
                key = (site, size, size * whole // part, block)
                cut.setdefault(key, []).append(layer)
    faults = [
        f"{site}: a rank has {part} of the {whole} elements of {listed(layers)} along the block "
        f"axis, not a multiple of block size {block}: use {_FEATURES}, a smaller block, or an "
        "exclude"
        for (site, part, whole, block), layers in cut.items()
    ]
    tiled = sorted(name for name in squares if SITES[name.partition(".")[0]].layer == ATTENTION)
    if chunk_tokens and tiled:
        faults.append(
            f"{', '.join(tiled)}: squares of a head cover tokens of several context-parallel "
            "chunks: use --context-parallel-size 1, or --without 2d"
        )
    return faults + [
        f"{site}: a context-parallel chunk of a micro-batch has {chunk_tokens} tokens, not a "
        f"multiple of block size {block}: use {_TOKENS}"
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


def _parts(name: str, module: Any, part: int) -> Sequence[int]:
    """Return the sizes on this rank of the parts that a layer concatenates; each is split.

    Gate and up of an MLP are two parts. The input projection of a Mamba layer has five, whose
    sizes upstream notes at the weight.
    """
    if sizes := getattr(getattr(module, "weight", None), "partition_sizes", None):
        return tuple(sizes)
    gated = getattr(getattr(module, "config", None), "gated_linear_unit", False)
    return (part // 2,) if gated and name.endswith("linear_fc1") else (part,)
