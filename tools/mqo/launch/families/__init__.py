"""The architectures of transformers that Megatron's flags express, one table per family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mqo.errors import ConvertError
from mqo.launch.families.deepseek_v2 import DEEPSEEK_V2
from mqo.launch.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3
from mqo.launch.families.experts import MIXTRAL, QWEN3_MOE
from mqo.launch.families.family import Family
from mqo.launch.families.nemotron_h import NEMOTRON_H
from mqo.matrix.tables import Shape

# Of several families that express a shape, the first is written.
FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (LLAMA, QWEN2, QWEN3, MISTRAL, QWEN3_MOE, MIXTRAL, DEEPSEEK_V2, NEMOTRON_H)
}


def family_of_config(config: Mapping[str, Any]) -> Family:
    """Return the family of a config.json; ConvertError if its architecture is not supported."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConvertError(f"config.json has architectures = {names!r}", expected="a list of names")
    family = FAMILIES.get(names[0] if names else "")
    if family is None:
        raise ConvertError(
            f"config.json has the architecture {', '.join(names) or '(none)'}",
            expected=" or ".join(FAMILIES),
        )
    return family


def family_of_shape(shape: Shape) -> Family:
    """Return the family that describes a shape; ConvertError if there is none."""
    is_gpt = shape.mamba is None and shape.activation == "swiglu"
    for family in FAMILIES.values():
        if is_gpt == (family is not NEMOTRON_H) and family.expresses(shape):
            return family
    names = ("mla", "moe", "mamba", "qkv_bias", "qk_norm")
    parts = [name for name in names if getattr(shape, name)]
    raise ConvertError(
        f"No architecture has {' and '.join(parts) or 'these parts'}",
        expected=f"a model of {' or '.join(FAMILIES)}",
    )
