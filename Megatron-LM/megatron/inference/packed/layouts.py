"""The layouts of packed weights: compressed-tensors', transformers' FP8, and mqo's.

A layout defines the tensors for the codes and scales of a weight, and the entry in config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from mqo.quant.codes import code_values
from mqo.quant.packing import PackedTensor
from mqo.quant.scales import largest_scale
from mqo.quant.spec import QuantSpec
from torch import Tensor

from .projections import Projection

Tensors = dict[str, Tensor]
Specs = Mapping[Projection, QuantSpec]
# Weights in squares, as published.
SQUARES = {name: QuantSpec(name, tile="square") for name in ("fp8_block", "fp8_block_fp32")}
_LARGEST = torch.finfo(torch.float32).max
_ROUTERS = r"re:.*\.mlp\.gate$"


@dataclass(frozen=True)
class Layout:
    """How packed weights are stored.

    `tensors` returns the tensors of a packed weight by suffix. `configuration` returns
    config.json's `quantization_config` for the packed projections and the unpacked modules.
    `refusal` returns why the weights of a model cannot be stored; None if they can. `dtype` returns
    the dtype in which the reader computes; None for the model's. `prefix` begins its file names.
    """

    tensors: Callable[[PackedTensor, Tensor | None], Tensors]
    configuration: Callable[[Specs, list[str]], dict[str, Any]]
    refusal: Callable[[Specs], str | None]
    dtype: Callable[[Specs], str | None] = lambda specs: None
    prefix: str = ""


def _one_spec(specs: Specs, known: Mapping[str, QuantSpec]) -> str | None:
    """Return why a layout with a single format, one of `known`, cannot store these weights."""
    kinds = set(specs.values())
    if len(kinds) > 1:
        return f"it stores one type, not {', '.join(sorted(k.quant_type for k in kinds))}"
    (kind,) = kinds
    if kind.quant_type not in known:
        return f"it does not store {kind.quant_type}"
    own = known[kind.quant_type]
    if kind.block != own.block or (own.tile == "square" and kind.tile != own.tile):
        return f"its {kind.quant_type} has other blocks"
    return None


# -- compressed-tensors ----------------------------------------------------------------------------


def _mxfp4(packed: PackedTensor, _: Tensor | None) -> Tensors:
    return {"weight_packed": packed.codes, "weight_scale": packed.scales.block}


def _mxfp8(packed: PackedTensor, _: Tensor | None) -> Tensors:
    codes = packed.codes.view(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": packed.scales.block}


def _nvfp4(packed: PackedTensor, amax: Tensor | None) -> Tensors:
    assert amax is not None  # the scale of the tensor needs it
    scales = packed.scales.block.view(torch.float8_e4m3fn)
    top = largest_scale(packed.spec) * packed.spec.format.minifloat.max_value
    encode = (top / amax.double()).float().clamp(max=_LARGEST)
    encode = torch.where(amax == 0, 1.0, encode).reshape(1)
    return {"weight_packed": packed.codes, "weight_scale": scales, "weight_global_scale": encode}


def _fp8(name: str) -> Callable[[PackedTensor, Tensor | None], Tensors]:
    """Return a function that stores E4M3 in squares with float32 scales called `name`."""

    def tensors(packed: PackedTensor, _: Tensor | None) -> Tensors:
        scales = packed.scales.block[:: packed.spec.block]
        if scales.dtype == torch.uint8:
            scales = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
        return {"weight": packed.codes.view(torch.float8_e4m3fn), name: scales}

    return tensors


@dataclass(frozen=True)
class _Compressed:
    """A format of compressed-tensors: its name, its arguments, its tensors.

    `reads_experts` says whether transformers 5.23 decodes packed experts correctly; a test tries
    each. `dtype` is the dtype that it decodes to; None for the model's.
    """

    name: str
    spec: QuantSpec
    weights: Mapping[str, Any]
    tensors: Callable[[PackedTensor, Tensor | None], Tensors]
    reads_experts: bool
    dtype: str | None = "bfloat16"


_GROUP = {"type": "float", "symmetric": True, "dynamic": False, "strategy": "group"}
_MXFP4 = _GROUP | {"num_bits": 4, "group_size": 32, "scale_dtype": "torch.uint8"}
_MXFP8 = _MXFP4 | {"num_bits": 8}
_NVFP4 = _GROUP | {"strategy": "tensor_group", "num_bits": 4, "group_size": 16}
_NVFP4 |= {"scale_dtype": "torch.float8_e4m3fn"}
_FP8 = _GROUP | {"strategy": "block", "block_structure": [128, 128], "num_bits": 8}
_SCALED = _fp8("weight_scale")
COMPRESSED = {
    entry.spec.quant_type: entry
    for entry in (
        _Compressed("mxfp4-pack-quantized", QuantSpec("mxfp4"), _MXFP4, _mxfp4, True),
        _Compressed("mxfp8-quantized", QuantSpec("mxfp8"), _MXFP8, _mxfp8, False),
        _Compressed("nvfp4-pack-quantized", QuantSpec("nvfp4"), _NVFP4, _nvfp4, False),
        _Compressed("float-quantized", SQUARES["fp8_block"], _FP8, _SCALED, True, None),
    )
}


def _compressed_tensors(packed: PackedTensor, amax: Tensor | None) -> Tensors:
    return COMPRESSED[packed.spec.quant_type].tensors(packed, amax)


def _compressed(specs: Specs) -> _Compressed:
    return COMPRESSED[next(iter(specs.values())).quant_type]


def _compressed_config(specs: Specs, left: list[str]) -> dict[str, Any]:
    own = _compressed(specs)
    group = {"targets": ["Linear"], "weights": dict(own.weights), "format": own.name}
    return {
        "quant_method": "compressed-tensors",
        "format": own.name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*left, _ROUTERS],
    }


def _compressed_refusal(specs: Specs) -> str | None:
    known = {name: entry.spec for name, entry in COMPRESSED.items()}
    if why := _one_spec(specs, known):
        return why
    own = _compressed(specs)
    if not own.reads_experts and any(projection.is_expert for projection in specs):
        return f"transformers decodes experts in {own.name} to wrong values"
    return None


# -- transformers' own of FP8, DeepSeek-V3's -------------------------------------------------------

_SIDE = 128


def _fp8_config(specs: Specs, left: list[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [_SIDE, _SIDE],
        "modules_to_not_convert": left,
    }


def _fp8_refusal(specs: Specs) -> str | None:
    if why := _one_spec(specs, SQUARES):
        return why
    # transformers 5.23 derives the side of a square from the rows of a weight and of its scales.
    odd = [weight for weight in specs if any(n > _SIDE and n % _SIDE for n in weight.shape)]
    if odd:
        return f"transformers reads {odd[0].module}, {list(odd[0].shape)}, with wrong squares"
    return None


# -- ours: tools/dequantize.py describes and reads it ----------------------------------------------


def _own_tensors(packed: PackedTensor, _: Tensor | None) -> Tensors:
    scales, total = packed.scales
    parts = {"codes": packed.codes, "scales": scales[:: _rows(packed.spec)], "scale": total}
    return {name: part for name, part in parts.items() if part.numel()}


def _own_config(specs: Specs, left: list[str]) -> dict[str, Any]:
    kinds = {kind.quant_type: kind for kind in specs.values()}
    return {
        "quant_method": "mqo",
        "types": {name: _described(kind) for name, kind in sorted(kinds.items())},
        "modules": {projection.module: kind.quant_type for projection, kind in specs.items()},
    }


def _described(spec: QuantSpec) -> dict[str, Any]:
    """Return the parameters of a format for readers; infinities and NaN as text."""
    values = [v if abs(v) < float("inf") else str(v) for v in code_values(spec.quant_type)]
    element = spec.format.block_scale
    return {
        "bits": spec.format.code_bits,
        "values": values,
        "scale": spec.format.scale,
        **({"block_scale": element.name} if element else {}),
        "block": spec.block,
        "rows": _rows(spec),
    }


def _rows(spec: QuantSpec) -> int:
    """Return the number of rows that share a row of scales."""
    return spec.block if spec.tile == "square" and spec.block else 1


# By preference: layouts that more programs read come first.
LAYOUTS = {
    "compressed-tensors": Layout(
        _compressed_tensors,
        _compressed_config,
        _compressed_refusal,
        lambda specs: _compressed(specs).dtype,
    ),
    "fp8": Layout(_fp8("weight_scale_inv"), _fp8_config, _fp8_refusal),
    # With the prefix, transformers finds no files; it would replace unknown tensors by random ones.
    "mqo": Layout(_own_tensors, _own_config, lambda specs: None, prefix="packed_"),
}
