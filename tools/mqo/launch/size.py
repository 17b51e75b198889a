"""Refuse a foreign model that is too large for this machine, before it is built."""

from __future__ import annotations

from mqo.errors import ConvertError
from mqo.matrix.tables import Shape
from mqo.megatron.run import isolated
from mqo.scale.layout import Layout
from mqo.scale.weights import rank_weights

MOST_LAYERS = 10_000
LARGEST = 1 << 31  # maximum of any other size, in elements
BYTES = 2  # minimum size of a weight
MAY_BE_ZERO = ("dense_layers", "shared_experts")


def check_size(where: str, shape: Shape) -> None:
    """Raise ConvertError for implausible sizes, and for more weights than fit in memory.

    Args:
        where: where the sizes come from, for the error.
        shape: the model's shape; its weights are counted with two bytes each.
    """
    check_numbers(where, shape)
    weights = rank_weights(shape, Layout(1), 0)
    needed, there = BYTES * (weights.dense + weights.expert), isolated.machine_memory()
    if needed > there:
        raise ConvertError(
            f"{where} describes a model of {weights.dense + weights.expert:,} weights, which take "
            f"{needed / 2**30:,.0f} GiB or more",
            expected=f"a model that fits into the {there / 2**30:,.0f} GiB of this machine",
            help="If these sizes are right, use a machine with more memory",
        )


def check_numbers(where: str, shape: Shape) -> None:
    """Raise ConvertError for implausible sizes."""
    for part in (shape, shape.mla, shape.moe, shape.mamba):
        for name, size in part or ():
            least = 0 if name in MAY_BE_ZERO else 1
            most = MOST_LAYERS if name == "num_layers" else LARGEST
            if type(size) is int and not least <= size <= most:
                raise ConvertError(
                    f"{where} has {name} = {size}", expected=f"a number from {least} to {most:,}"
                )
