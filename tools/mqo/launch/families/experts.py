"""Families with grouped queries and experts: Qwen3-MoE and Mixtral."""

from __future__ import annotations

from typing import Any

from mqo.errors import ConvertError
from mqo.launch.families.dense import (
    FULL_ATTENTION,
    GROUPS,
    HEAD_KEYS,
    NO_BIAS,
    OF_WINDOWS,
    ROPE_KINDS,
    SILU,
    read_heads,
    write_heads,
)
from mqo.launch.families.family import Family, Table, read_names, write_names
from mqo.matrix.tables import Moe, Shape

_MLP_ONLY, _RENORMALIZED = "mlp_only_layers", "norm_topk_prob"
_COUNTS = ("num_experts", "num_local_experts")  # the names of older and newer transformers
# {field of the shape's part: key of config.json}
_QWEN3 = {
    "num_experts": "num_experts",
    "topk": "num_experts_per_tok",
    "expert_ffn_size": "moe_intermediate_size",
    "aux_loss": "router_aux_loss_coef",
    "renormalized": _RENORMALIZED,
}
_MIXTRAL = {
    "num_experts": "num_local_experts",
    "topk": "num_experts_per_tok",
    "expert_ffn_size": "intermediate_size",
    "aux_loss": "router_aux_loss_coef",
}


def _read_qwen3_moe(config: Table) -> dict[str, Any]:
    dense = config.get(_MLP_ONLY) or []
    if dense != list(range(len(dense))):
        raise ConvertError(
            f"config.json has {_MLP_ONLY} = {dense!r}", expected="the first layers, or none"
        )
    counts = {config[key] for key in _COUNTS if config.get(key) is not None}
    if len(counts) != 1:
        raise ConvertError(
            f"config.json has {sorted(counts)} as {' or '.join(_COUNTS)}", expected="one number"
        )
    own = read_names({**config, _COUNTS[0]: counts.pop()}, _QWEN3)
    moe = Moe(dense_layers=len(dense), shared_experts=0, **own)
    return read_heads(config) | {"qk_norm": True, "moe": moe}


def _write_qwen3_moe(shape: Shape) -> dict[str, Any]:
    assert shape.moe is not None
    fixed = {"attention_bias": False, "use_sliding_window": False, "decoder_sparse_step": 1}
    dense = {_MLP_ONLY: list(range(shape.moe.dense_layers))}
    return write_heads(shape) | fixed | dense | write_names(shape.moe, _QWEN3)


def _read_mixtral(config: Table) -> dict[str, Any]:
    own = read_names(config, _MIXTRAL)
    return read_heads(config) | {
        "moe": Moe(dense_layers=0, shared_experts=0, renormalized=True, **own)
    }


def _is(shape: Shape, *, qk_norm: bool) -> bool:
    moe = shape.moe
    return (
        shape.mla is None
        and moe is not None
        and moe.shared_experts == 0
        and not shape.qkv_bias
        and shape.qk_norm == qk_norm
    )


def _is_mixtral(shape: Shape) -> bool:
    moe = shape.moe
    return (
        _is(shape, qk_norm=False) and moe is not None and moe.renormalized and moe.dense_layers == 0
    )


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    fixed=SILU | NO_BIAS | FULL_ATTENTION | {"decoder_sparse_step": (1,)},
    defaults={
        GROUPS: 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "router_aux_loss_coef": 0.001,
        _RENORMALIZED: False,
    },
    read=_read_qwen3_moe,
    write=_write_qwen3_moe,
    expresses=lambda shape: _is(shape, qk_norm=True),
    rope_kinds=ROPE_KINDS,
    read_keys=HEAD_KEYS | {_MLP_ONLY, *_COUNTS},
    ignored_keys=OF_WINDOWS,
)
MIXTRAL = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    fixed=SILU | {"sliding_window": (None,)},
    defaults={
        GROUPS: 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
        "rope_theta": 1e6,
    },
    read=_read_mixtral,
    write=lambda shape: (
        write_heads(shape) | {"sliding_window": None} | write_names(shape.moe, _MIXTRAL)
    ),
    expresses=_is_mixtral,
    rope_kinds=ROPE_KINDS,
    read_keys=HEAD_KEYS,
    ignored_keys=frozenset({"router_jitter_noise"}),  # of training
)
