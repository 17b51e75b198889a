"""Families with grouped queries and one MLP per layer: Llama, Qwen2, Qwen3 and Mistral.

SmolLM and many others are LlamaForCausalLM. Qwen2 adds biases to queries, keys and values, Qwen3
normalizes queries and keys.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mqo.errors import ConvertError
from mqo.launch.families.family import Family, Table, Values
from mqo.matrix.tables import Shape

SILU: Values = {"hidden_act": ("silu",)}
NO_BIAS: Values = {"attention_bias": (False,)}
FULL_ATTENTION: Values = {"use_sliding_window": (False,)}
# Of Qwen: not read unless use_sliding_window is true.
OF_WINDOWS = frozenset({"sliding_window", "max_window_layers"})
_LAYERS, _FULL = "layer_types", "full_attention"
ROPE_KINDS = ("default", "llama3")
GROUPS, HEAD_DIM = "num_key_value_heads", "head_dim"
HEAD_KEYS = frozenset({GROUPS, HEAD_DIM})


def read_heads(config: Table) -> dict[str, Any]:
    """Return the number of query groups, and the size of a head unless it follows from others."""
    heads, groups, size = config["num_attention_heads"], config.get(GROUPS), config.get(HEAD_DIM)
    if size is None:
        size = config["hidden_size"] // heads
    return {
        "num_query_groups": heads if groups is None else groups,
        "head_dim": None if size * heads == config["hidden_size"] else size,
    }


def write_heads(shape: Shape) -> dict[str, Any]:
    """Return the keys of `read_heads`."""
    return {GROUPS: shape.num_query_groups, HEAD_DIM: shape.head_size}


def check_layer_types(config: Table) -> None:
    """Raise ConvertError if some layers do not attend to all earlier tokens."""
    other = [kind for kind in config.get(_LAYERS) or () if kind != _FULL]
    if other:
        raise ConvertError(
            f"config.json has {_LAYERS} with {other[0]!r}", expected=f"only {_FULL!r}"
        )


def _is(shape: Shape, *, qkv_bias: bool = False, qk_norm: bool = False) -> bool:
    return (
        shape.mla is None
        and shape.moe is None
        and (shape.qkv_bias, shape.qk_norm) == (qkv_bias, qk_norm)
    )


def _read_qwen(config: Table, **parts: bool) -> dict[str, Any]:
    check_layer_types(config)
    return read_heads(config) | parts


LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    fixed={**SILU, **NO_BIAS, "mlp_bias": (False,), "rope_interleaved": (False,)},
    read=read_heads,
    write=lambda shape: write_heads(shape) | {"attention_bias": False, "mlp_bias": False},
    expresses=_is,
    rope_kinds=ROPE_KINDS,
    read_keys=HEAD_KEYS,
)
MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    fixed=SILU | {"sliding_window": (None,)},
    defaults={"sliding_window": 4096, GROUPS: 8},
    read=read_heads,
    write=lambda shape: write_heads(shape) | {"sliding_window": None},
    expresses=_is,
    rope_kinds=ROPE_KINDS,
    read_keys=HEAD_KEYS,
)
QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    fixed=SILU | FULL_ATTENTION | {"use_mrope": (False,)},
    defaults={GROUPS: 32},
    read=partial(_read_qwen, qkv_bias=True),
    write=lambda shape: write_heads(shape) | {"use_sliding_window": False},
    expresses=partial(_is, qkv_bias=True),
    rope_kinds=ROPE_KINDS,
    read_keys=HEAD_KEYS | {_LAYERS},
    ignored_keys=OF_WINDOWS,
    tokenizer_class="Qwen2Tokenizer",
)
QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    fixed=SILU | NO_BIAS | FULL_ATTENTION,
    defaults={GROUPS: 32, HEAD_DIM: 128},
    read=partial(_read_qwen, qk_norm=True),
    write=lambda shape: write_heads(shape) | {"attention_bias": False, "use_sliding_window": False},
    expresses=partial(_is, qk_norm=True),
    rope_kinds=ROPE_KINDS,
    read_keys=HEAD_KEYS | {_LAYERS},
    ignored_keys=OF_WINDOWS,
)
