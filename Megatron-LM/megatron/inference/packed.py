"""Trained weights as codes and scales, in the layout that compressed-tensors reads.

A folder with config.json and safetensors, as transformers has them, becomes one whose projections
are packed. Embeddings, norms, routers and the LM head stay as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.quant import QuantSpec
from megatron.quant.pack import PackedTensor, pack
from torch import Tensor

from .errors import PtqError
from .export import write_json

Tensors = dict[str, Tensor]
_PROJECTION = re.compile(
    r"(?P<layer>model\.layers\.\d+\.(?:self_attn|mlp)\b.*?)\.(?P<name>\w+)\.weight"
)
# What Megatron has as one layer, with one amax: Hugging Face's names of its parts.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "kv_a_proj_with_mqa", "kv_b_proj")
PROJECTIONS = (*_NAMES, "gate_proj", "up_proj", "down_proj")
# Modules that stay as they are: the LM head and routers.
LEFT = ("lm_head", r"re:.*\.mlp\.gate$")
_EXPERTS = ".mlp.experts."
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Layout:
    """How a format is stored.

    `name` is compressed-tensors' of it, `weights` its arguments. `tensors` returns by suffix what
    stands for a weight [out, in], of its packed form and the amax of its tensor scale. `tile` is
    the weight's. `reads_experts` says whether transformers 5.23 decodes packed experts rightly; the
    test has tried each.
    """

    name: str
    weights: Mapping[str, Any]
    tensors: Callable[[PackedTensor, Tensor], Tensors]
    tile: str = "row"
    reads_experts: bool = True


def _mxfp4(packed: PackedTensor, amax: Tensor) -> Tensors:
    return {"weight_packed": packed.codes, "weight_scale": packed.scales.block}


def _mxfp8(packed: PackedTensor, amax: Tensor) -> Tensors:
    codes = packed.codes.view(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": packed.scales.block}


def _nvfp4(packed: PackedTensor, amax: Tensor) -> Tensors:
    scales = packed.scales.block.view(torch.float8_e4m3fn)
    encode = (2688.0 / amax.double()).float().clamp(max=_LARGEST)
    encode = torch.where(amax == 0, 1.0, encode).reshape(1)
    return {"weight_packed": packed.codes, "weight_scale": scales, "weight_global_scale": encode}


def _fp8_block(packed: PackedTensor, amax: Tensor) -> Tensors:
    side = packed.spec.block or 1
    exponents = packed.scales.block[::side].int() - 127
    scales = torch.ldexp(torch.ones(()), exponents)
    return {"weight": packed.codes.view(torch.float8_e4m3fn), "weight_scale": scales}


_GROUP = {"type": "float", "symmetric": True, "dynamic": False, "strategy": "group"}
_TENSOR_GROUP = _GROUP | {"strategy": "tensor_group"}
_BLOCK = _GROUP | {"strategy": "block", "block_structure": [128, 128]}
LAYOUTS = {
    "mxfp4": Layout(
        "mxfp4-pack-quantized",
        _GROUP | {"num_bits": 4, "group_size": 32, "scale_dtype": "torch.uint8"},
        _mxfp4,
    ),
    "mxfp8": Layout(
        "mxfp8-quantized",
        _GROUP | {"num_bits": 8, "group_size": 32, "scale_dtype": "torch.uint8"},
        _mxfp8,
        reads_experts=False,
    ),
    "nvfp4": Layout(
        "nvfp4-pack-quantized",
        _TENSOR_GROUP | {"num_bits": 4, "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
        _nvfp4,
        reads_experts=False,
    ),
    "fp8_block": Layout("float-quantized", _BLOCK | {"num_bits": 8}, _fp8_block, "square"),
}


def spec_of(quant_type: str) -> QuantSpec:
    """Return how a weight is quantized for a layout; KeyError for a type that has none."""
    return QuantSpec(quant_type, tile=LAYOUTS[quant_type].tile)


def packed(tensors: Mapping[str, Tensor], quant_type: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model, its projections packed; a name as it came where it stays."""
    layout, spec = LAYOUTS[quant_type], spec_of(quant_type)
    if not layout.reads_experts and any(_EXPERTS in name for name in tensors):
        taken = [name for name, one in LAYOUTS.items() if one.reads_experts]
        raise PtqError(
            f"transformers reads experts in {layout.name} with other values than these",
            f"a model without experts, or {' or '.join(taken)}",
        )
    for name, tensor in tensors.items():
        found = _PROJECTION.fullmatch(name)
        if found is None or found["name"] not in PROJECTIONS or tensor.dim() != 2:
            yield name, tensor
            continue
        amax = _amax(tensors, found["layer"], found["name"])
        made = pack(tensor, spec, -1, amax=amax)
        for suffix, part in layout.tensors(made, amax).items():
            yield f"{name.removesuffix('weight')}{suffix}", part.contiguous()


def _amax(tensors: Mapping[str, Tensor], layer: str, name: str) -> Tensor:
    """Return the largest magnitude of a projection and those that Megatron has fused with it."""
    names: Sequence[str] = next((these for these in _FUSED if name in these), (name,))
    parts = [
        tensors[f"{layer}.{one}.weight"] for one in names if f"{layer}.{one}.weight" in tensors
    ]
    return torch.stack([part.abs().amax().float() for part in parts]).amax()


def configuration(quant_type: str) -> dict[str, Any]:
    """Return what config.json says of it."""
    layout = LAYOUTS[quant_type]
    group = {"targets": ["Linear"], "weights": dict(layout.weights), "format": layout.name}
    return {
        "quant_method": "compressed-tensors",
        "format": layout.name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(LEFT),
    }


def pack_folder(source: Path, target: Path, quant_type: str) -> None:
    """Write the weights and config.json of `source` into the folder `target`, packed."""
    from safetensors.torch import load_file, save_file

    tensors: Tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        tensors |= load_file(path)
    save_file(dict(packed(tensors, quant_type)), target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = configuration(quant_type)
    write_json(target / "config.json", config)
