"""Weights of linear layers by transformers' names, and the layers that Megatron has them in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_WEIGHT = ".weight"
_HEAD = "lm_head"
_PLACE = re.compile(
    r"model\.layers\.(?P<index>\d+)\.(?P<part>self_attn|mlp)\."
    r"(?:experts\.(?P<expert>\d+)\.|(?P<shared>shared_experts)\.)?(?P<name>\w+)"
)
# {a layer of Megatron's: its parts in transformers}, of which the first that is whole is meant:
# latent attention has only a q_proj.
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

    module: its name there, without `.weight`. shape: [out, in]. layer: Megatron's, as quant.toml
    has it. parts: the modules that are this layer in Megatron, which has one weight of them, with
    one amax.
    """

    module: str
    shape: tuple[int, ...]
    layer: str
    parts: tuple[str, ...]

    @property
    def is_head(self) -> bool:
        """Whether it is the output layer's."""
        return self.module == _HEAD

    @property
    def is_expert(self) -> bool:
        """Whether it is a routed expert's."""
        return ".experts." in self.module

    @property
    def has_heads(self) -> bool:
        """Whether Megatron's layer has the parts' rows one head after another."""
        return self.layer.endswith("linear_qkv")


def projections(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Projection]:
    """Return {name of a weight: its projection}, of a model's tensors by name."""
    modules = {name.removesuffix(_WEIGHT) for name in shapes if name.endswith(_WEIGHT)}
    found = {}
    for module in sorted(modules):
        if place := _place(module, modules):
            name = f"{module}{_WEIGHT}"
            found[name] = Projection(module, shapes[name], *place)
    return found


def _place(module: str, modules: set[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return Megatron's layer that a module is part of, and the layer's parts; None of others."""
    if module == _HEAD:
        return "output_layer", (module,)
    place = _PLACE.fullmatch(module)
    if place is None:
        return None
    folder = module.removesuffix(place["name"])
    for layer, parts in (_MLP if place["part"] == "mlp" else _ATTENTION).items():
        whole = tuple(folder + part for part in parts)
        if place["name"] in parts and modules.issuperset(whole):
            return f"{_megatrons(place)}.{layer}", whole
    return None  # a router's, say


def _megatrons(place: re.Match[str]) -> str:
    """Return what Megatron calls the module that has the layer."""
    part = "self_attention" if place["part"] == "self_attn" else "mlp"
    name = f"decoder.layers.{place['index']}.{part}"
    if place["expert"]:
        return f"{name}.experts.local_experts.{place['expert']}"
    return f"{name}.{place['shared']}" if place["shared"] else name
