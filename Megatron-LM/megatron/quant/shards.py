"""Blocks that a parallel layout would cut in two: found before the first step.

A block lies along the axis that its GEMM sums over. Where a layout deals this axis out to ranks,
it must cut between blocks, or a rank would quantize other blocks than one process does.
"""

from collections.abc import Iterable, Mapping

from .formats import LINEAR
from .layers import FoundLayer
from .traps import IsExcluded, listed

# Per class of a linear layer: the site whose sum tensor parallelism splits, and its size there.
_SPLIT = {
    "RowParallelLinear": ("fprop", "input_size"),
    "ColumnParallelLinear": ("dgrad", "output_size"),
}


def cut_blocks(
    blocks: Mapping[str, int],
    found: Iterable[FoundLayer],
    chunk_tokens: int,
    is_excluded: IsExcluded,
) -> list[str]:
    """Say, one text a fault, which sums this rank has a part of that is cut in a block.

    Args:
        blocks: of each site that quantizes in blocks, how long they are.
        found: this rank's layers.
        chunk_tokens: tokens of a micro-batch in one context-parallel chunk; 0 without chunks.
        is_excluded: whether the run leaves (site, layer) unquantized.
    """
    cut: dict[tuple[str, int, int], list] = {}
    for layer, module, _ in found:
        classes = {cls.__name__ for cls in type(module).__mro__}
        for site, size in (_SPLIT[name] for name in classes & _SPLIT.keys()):
            whole = getattr(module, size, None)
            part = getattr(module, f"{size}_per_partition", whole)
            if layer.kind != LINEAR or site not in blocks or is_excluded(site, layer.name):
                continue
            # Gate and up lie one behind the other, and are each dealt out.
            pieces = 2 if layer.name.endswith("linear_fc1") and _gated(module) else 1
            if part != whole and part // pieces % blocks[site]:
                cut.setdefault((site, part // pieces, whole // pieces), []).append(layer)
    faults = [
        f"{site}: a rank has {part} of the {whole} elements that {listed(layers)} sums over, no "
        f"multiple of the block of {blocks[site]}: another --tensor-model-parallel-size (for "
        "experts --expert-tensor-parallel-size), a smaller block, or an exclude"
        for (site, part, whole), layers in cut.items()
    ]
    if "wgrad" in blocks and chunk_tokens % blocks["wgrad"]:
        faults.append(
            f"wgrad: a context-parallel chunk of a micro-batch has {chunk_tokens} tokens, no "
            f"multiple of the block of {blocks['wgrad']}: another --context-parallel-size, "
            "--seq-length or --micro-batch-size"
        )
    return faults


def _gated(module: object) -> bool:
    return bool(getattr(getattr(module, "config", None), "gated_linear_unit", False))
