"""Map weights of linear layers in transformers to Megatron's layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mqo.megatron.run.gpt_blocks import hybrid_name

_WEIGHT = ".weight"
_HEAD = "lm_head"
_MODULE = re.compile(
    r"model\.layers\.(?P<index>\d+)\.(?P<part>self_attn|mlp)\."
    r"(?:experts\.(?P<expert>\d+)\.|(?P<shared>shared_experts)\.)?(?P<name>\w+)"
)
# {Megatron's layer: its parts in transformers}. The first layer with all its parts counts: latent
# attention has only a q_proj.
_ATTENTION = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q_proj": ("q_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
    "linear_proj": ("o_proj",),
}
_MLP = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}


@dataclass(frozen=True)
class Projection:
    """The weight of a linear layer in transformers.

    module: its name there, without `.weight`. shape: [out, in]. layer: Megatron's name, as in
    quant.toml. parts: the modules that form this layer in Megatron, where they are one weight with
    one amax.
    """

    module: str
    shape: tuple[int, ...]
    layer: str
    parts: tuple[str, ...]

    @property
    def is_head(self) -> bool:
        """Whether it is the weight of the output layer."""
        return self.module == _HEAD

    @property
    def is_expert(self) -> bool:
        """Whether it is a weight of a routed expert."""
        return ".experts." in self.module

    @property
    def has_heads(self) -> bool:
        """Whether Megatron's layer interleaves the rows of the parts by head."""
        return self.layer.endswith("linear_qkv")


def projections(
    shapes: Mapping[str, tuple[int, ...]], *, is_hybrid: bool = False
) -> dict[str, Projection]:
    """Return {name of a weight: its projection} for the tensors of a model, {name: shape}.

    If it `is_hybrid`, names in Megatron are those of a HybridModel, else of a GPT.
    """
    modules = {name.removesuffix(_WEIGHT) for name in shapes if name.endswith(_WEIGHT)}
    result = {}
    for module in sorted(modules):
        if whole := _megatron_layer(module, modules):
            name, (layer, parts) = f"{module}{_WEIGHT}", whole
            layer = hybrid_name(layer) if is_hybrid else layer
            result[name] = Projection(module, shapes[name], layer, parts)
    return result


def _megatron_layer(module: str, modules: set[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return the layer in Megatron that contains a module, and its parts; None for others."""
    if module == _HEAD:
        return "output_layer", (module,)
    match = _MODULE.fullmatch(module)
    if match is None:
        return None
    folder = module.removesuffix(match["name"])
    for layer, parts in (_MLP if match["part"] == "mlp" else _ATTENTION).items():
        whole = tuple(folder + part for part in parts)
        if match["name"] in parts and modules.issuperset(whole):
            return f"{_megatron_module(match)}.{layer}", whole
    return None  # for example a router


def _megatron_module(match: re.Match[str]) -> str:
    """Return Megatron's name of the module that contains the layer."""
    part = "self_attention" if match["part"] == "self_attn" else "mlp"
    name = f"decoder.layers.{match['index']}.{part}"
    if match["expert"]:
        return f"{name}.experts.local_experts.{match['expert']}"
    return f"{name}.{match['shared']}" if match["shared"] else name
