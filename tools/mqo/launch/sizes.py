"""Refuse layers whose sizes a custom quantizer does not accept, before any process starts."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

from mqo.errors import RunError
from mqo.launch.config import RunConfig
from mqo.launch.flags import length, shape_flags
from mqo.launch.layout import read_sizes
from mqo.launch.products import EXPERT, Product
from mqo.quant import table as option_table
from mqo.quant.formats import SITES
from mqo.quant.spec import OperandSpec

# {side on which tensor parallelism splits a weight: the site whose sum it splits, too}
_SPLIT_SUMS = {"row": "fprop", "column": "dgrad"}


def needs_sizes(resolved: Any) -> bool:
    """Return whether a quantizer of a QuantConfig accepts only some sizes."""
    return any(entry.operand_spec.multiple > 1 for entry in option_table.entries(resolved))


def check_sizes(
    config: RunConfig, resolved: Any, products: Iterable[Product], sides: Mapping[str, str]
) -> None:
    """Raise RunError for the first layer with a size that its quantizer does not accept.

    Args:
        config: the run, with the flags of its layout.
        resolved: its QuantConfig.
        products: those of a step on one process.
        sides: {layer: "column" or "row"} of the layers that tensor parallelism splits.
    """
    ranks = read_sizes(shape_flags(config.experiment, config.placement.layout))
    steps = length(config.experiment).steps
    for product in products:
        if product.gemm not in SITES:
            continue
        for operand, spec in _specs(resolved, product, steps):
            fault, flags = _fault(spec, product, ranks, sides.get(product.layer))
            if fault:
                recipe = config.quantization.recipe
                name = f"The recipe {recipe.name}" if recipe else "The run"
                raise RunError(
                    f"{name} cannot quantize {product.layer}: its {operand} at {product.gemm} has "
                    f"{fault}",
                    expected=f"a multiple, with other {flags}; or a rule or --exclude that leaves "
                    "the layer out",
                    help="`mqo coverage`, with the same model and quantization, lists the sizes of "
                    "all layers as k",
                )


def _specs(resolved: Any, product: Product, steps: int) -> Iterable[tuple[str, OperandSpec]]:
    """Yield (operand, spec) of a product in each phase of training that begins."""
    site = SITES[product.gemm]
    for kind in option_table.phase_types(resolved, site.name, steps):
        for operand in (site.lhs, site.rhs):
            yield operand, resolved.operand_spec(site.name, operand, product.layer, kind)


def _sharing(product: Product, ranks: argparse.Namespace, side: str | None) -> int:
    """Return the number of ranks that share the sums of a product; `ranks` are a run's sizes."""
    if product.gemm == "wgrad":
        return int(ranks.context_parallel_size)
    if _SPLIT_SUMS.get(side or "") != product.gemm:
        return 1
    own = ranks.expert_tensor_parallel_size if EXPERT in product.layer else None
    return int(own or ranks.tensor_model_parallel_size)


def _fault(
    spec: OperandSpec, product: Product, ranks: argparse.Namespace, side: str | None
) -> tuple[str, str]:
    """Return why an operand is refused, or '', and the flags that decide its size."""
    if product.gemm == "wgrad" and EXPERT in product.layer and spec.multiple > 1:
        needed = f"{spec.spec.quant_type} needs a multiple of {spec.multiple}"
        return f"as many elements per row as it gets tokens, and {needed}", "types for wgrad"
    count = _sharing(product, ranks, side)
    size = product.k // count
    fault = spec.size_fault(size)
    if not fault:
        return "", ""
    shared = f" ({product.k:,} on {count} ranks)" if count > 1 else ""
    if product.gemm == "wgrad":
        flags = "--seq-length, --micro-batch-size or --context-parallel-size"
    else:
        flags = "sizes of the model" + (" or a smaller tensor-parallel size" if shared else "")
    return f"{size:,} elements per row{shared}, and {fault}", flags
