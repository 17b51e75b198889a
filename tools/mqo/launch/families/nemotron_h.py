"""Nemotron-H without experts: Mamba-2 layers, attention without positions, squared ReLU."""

from __future__ import annotations

from typing import Any

from mqo.errors import ConvertError
from mqo.launch.families.dense import GROUPS, HEAD_DIM, HEAD_KEYS, read_heads, write_heads
from mqo.launch.families.family import Family, Table, Values, read_names, refuse_others, write_names
from mqo.matrix.tables import Mamba, Shape

# {field of the shape's part: key of config.json}
MAMBA = {
    "num_heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "num_groups": "n_groups",
    "state_dim": "ssm_state_size",
}
# Megatron's gated norms have this epsilon, independent of the other norms.
GATED_EPSILON = 1e-5
# Transformers raises smaller step sizes to this minimum, and Megatron does not. The least one that
# is written has no effect: its logarithm must be finite.
LEAST_STEP, LARGEST_LEAST_STEP = 1e-30, 1e-3
STEP = "time_step_min"
_EPSILON, _PATTERN, _LAYERS = "layer_norm_epsilon", "hybrid_override_pattern", "num_hidden_layers"
_TYPES = ("layers_block_type", "layer_types")  # the pattern as a list, in newer files
_SYMBOLS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"}
_SYMBOLS |= {"mlp": "-", "moe": "E"}
_FIXED: Values = {
    "mlp_hidden_act": ("relu2",),
    "mamba_hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_bias": (False,),
    "mamba_proj_bias": (False,),
    "use_conv_bias": (True,),
    "conv_kernel": (4,),
    "sliding_window": (None,),
    "residual_in_fp32": (False,),
    "num_nextn_predict_layers": (0, None),
    # Transformers does not tie the embeddings of this class.
    "tie_word_embeddings": (False,),
}
# Of experts, which a pattern without them does not have.
_OF_EXPERTS = """
moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size moe_shared_expert_overlap
mtp_hybrid_override_pattern mtp_layers_block_type n_group n_routed_experts n_shared_experts
norm_topk_prob num_experts_per_tok routed_scaling_factor topk_group
"""
# Of initial weights, of training and generation, of the arithmetic; and two that are not read.
_WITHOUT_EFFECT = """
chunk_size expand hidden_dropout mamba_ssm_cache_dtype num_logits_to_keep rescale_prenorm_residual
rms_norm_eps time_step_floor time_step_limit time_step_max use_mamba_kernels
"""


def _read(config: Table) -> dict[str, Any]:
    size = config[HEAD_DIM]
    pattern = _pattern(config)
    own: Values = {
        _LAYERS: (len(pattern), None),
        "attention_head_dim": (size, None),  # of older files; transformers reads the other key
        _EPSILON: (GATED_EPSILON,),
    }
    refuse_others("config.json", config, own)
    if not 0 <= config[STEP] <= LARGEST_LEAST_STEP:
        raise ConvertError(
            f"config.json has {STEP} = {config[STEP]!r}",
            expected=f"0 to {LARGEST_LEAST_STEP:g}: Megatron has no minimum of step sizes",
        )
    mamba = Mamba(**read_names(config, MAMBA))
    return read_heads(config) | {"pattern": pattern, "activation": "squared_relu", "mamba": mamba}


def _pattern(config: Table) -> str:
    """Return the pattern of layers; ConvertError if there is none, or several, or experts."""
    given = {key: config[key] for key in (_PATTERN, *_TYPES) if config.get(key)}
    patterns = {
        value if isinstance(value, str) else "".join(_SYMBOLS.get(kind, "?") for kind in value)
        for value in given.values()
    }
    if len(patterns) != 1 or not set(*patterns) <= set("M*-") or "M" not in set(*patterns):
        text = " and ".join(f"{key} = {value!r}" for key, value in given.items())
        raise ConvertError(
            f"config.json has {text or f'no {_PATTERN}'}",
            expected=f"{_PATTERN}, or {_TYPES[0]}, with Mamba layers (M), attention (*) and MLPs "
            "(-), and without experts",
        )
    return patterns.pop()


def _write(shape: Shape) -> dict[str, Any]:
    assert shape.pattern is not None
    pattern = shape.pattern.replace("|", "")
    own = {_PATTERN: pattern, _LAYERS: len(pattern), STEP: LEAST_STEP}
    fixed = {name: values[0] for name, values in _FIXED.items()}
    return fixed | own | write_heads(shape) | write_names(shape.mamba, MAMBA)


def notes(config: Table) -> tuple[str, ...]:
    """Return what the user must know about weights that are converted to Megatron."""
    least = config[STEP]
    if least <= LEAST_STEP:
        return ()
    return (
        f"transformers raises step sizes of Mamba layers below {STEP} = {least:g} to it, and "
        "Megatron does not: where a step is smaller, the logits differ",
    )


def _expresses(shape: Shape) -> bool:
    return (
        shape.mamba is not None
        and (shape.activation, shape.rotary_base) == ("squared_relu", None)
        and (shape.moe, shape.tied_embeddings) == (None, False)
        and (shape.qkv_bias, shape.qk_norm) == (False, False)
        and shape.norm_epsilon == GATED_EPSILON
    )


NEMOTRON_H = Family(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    fixed=_FIXED,
    defaults={
        GROUPS: 8,
        HEAD_DIM: 128,
        _EPSILON: GATED_EPSILON,
        STEP: 0.001,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
    },
    sizes={
        "hidden_size": "hidden_size",
        "ffn_hidden_size": "intermediate_size",
        "num_attention_heads": "num_attention_heads",
        "vocab_size": "vocab_size",
        "norm_epsilon": _EPSILON,
    },
    read=_read,
    write=_write,
    notes=notes,
    expresses=_expresses,
    rope_kinds=(),
    read_keys=HEAD_KEYS | {_PATTERN, _LAYERS, "attention_head_dim", *_TYPES},
    ignored_keys=frozenset([*_OF_EXPERTS.split(), *_WITHOUT_EFFECT.split()]),
)
