"""Find linear layers that have quantization sites, their weights, and their tensor-parallel split.

The functions read class names, so that neither upstream's layers nor Transformer Engine's need to
be imported.
"""

import functools
import importlib.util
from collections.abc import Mapping
from typing import Any

from torch.nn import Module, Parameter

from mqo.megatron.transformer_engine import releases
from mqo.quant.source import site_types

COLUMN, ROW = "column", "row"
# The axis of a layer's weight that tensor parallelism splits: its outputs, or its inputs.
_SIDES = {
    "ColumnParallelLinear": COLUMN,
    "RowParallelLinear": ROW,
    "TEColumnParallelLinear": COLUMN,
    "TELayerNormColumnParallelLinear": COLUMN,
    "TEColumnParallelGroupedLinear": COLUMN,
    "TERowParallelLinear": ROW,
    "TERowParallelGroupedLinear": ROW,
}
_LOCAL = ("ColumnParallelLinear", "RowParallelLinear")
# {class of Transformer Engine: the parameters that its GEMMs multiply, in their order}
_GEMMS = {
    "Linear": ("weight",),
    "LayerNormLinear": ("weight",),
    "LayerNormMLP": ("fc1_weight", "fc2_weight"),
}
_GROUPED = "GroupedLinear"


def side(module: Module) -> str | None:
    """Return COLUMN or ROW for a layer that tensor parallelism splits, else None."""
    return next((_SIDES[name] for name in _names(module) if name in _SIDES), None)


def has_sites(module: Module) -> bool:
    """Return whether the class of `module` is one whose GEMMs call the linear sites."""
    return is_engines(module) or any(name in _LOCAL for name in _names(module))


def is_engines(module: Module) -> bool:
    """Return whether `module` is a linear layer of Transformer Engine."""
    return _engine_class(module) is not None


def asks_for_quantizers(module: Module) -> bool:
    """Return whether `module` is one of Transformer Engine that requests quantizers."""
    return any(
        cls.__name__ == "TransformerEngineBaseModule" and _is_engine_class(cls)
        for cls in type(module).__mro__
    )


def is_grouped(module: Module) -> bool:
    """Return whether `module` is Transformer Engine's layer with several weights in one GEMM."""
    return _engine_class(module) == _GROUPED


def weights(module: Any) -> list[tuple[str, Parameter]]:
    """Return (name, weight) of the 2-D weights of a layer, in the order of its GEMMs."""
    kind = _engine_class(module)
    if kind == _GROUPED:
        names = tuple(f"weight{i}" for i in range(module.num_gemms))
    else:
        names = _GEMMS.get(kind or "", ("weight",))
    candidates = ((name, getattr(module, name, None)) for name in names)
    return [(name, w) for name, w in candidates if isinstance(w, Parameter) and w.dim() == 2]


def group(module: Module) -> Any:
    """Return the process group of the ranks that split `module`; None if the module has none.

    For an expert this is the group of expert tensor parallelism. Modules have the attribute since
    megatron-core 0.16. In Transformer Engine it may be None if upstream's layer communicates.
    """
    return getattr(module, "_tp_group" if is_engines(module) else "tp_group", None)


def split_size(module: Any) -> tuple[int, int] | None:
    """Return the elements along the split axis, on this rank and on all; None if not split."""
    which = side(module)
    if which is None:
        return None
    if is_engines(module):
        part = module.in_features if which == ROW else module.out_features
        ranks = group(module)
        return part, part * (ranks.size() if ranks is not None else 1)
    name = "input_size" if which == ROW else "output_size"
    whole = getattr(module, name, 0)
    return getattr(module, f"{name}_per_partition", whole), whole


@functools.cache
def source_types() -> Mapping[str, str]:
    """Return the types of the linear sites in the source of upstream's linear layers."""
    spec = importlib.util.find_spec("megatron.core.tensor_parallel.layers")
    assert spec is not None and spec.origin is not None
    return site_types(spec.origin)


def _names(module: Module) -> list[str]:
    return [cls.__name__ for cls in type(module).__mro__]


def _engine_class(module: Module) -> str | None:
    for cls in type(module).__mro__:
        known = cls.__name__ in _GEMMS or cls.__name__ == _GROUPED
        if known and _is_engine_class(cls):
            return cls.__name__
    return None


def _is_engine_class(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == releases.NAME
