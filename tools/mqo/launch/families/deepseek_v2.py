"""DeepSeek-V2 without query latents: multi-latent attention, and experts after dense layers."""

from __future__ import annotations

from typing import Any

from mqo.launch.families.family import Family, Table, Values, read_names, refuse_others, write_names
from mqo.matrix import tables
from mqo.matrix.tables import Mla, Moe, Shape

# {field of the shape's part: key of config.json}
MLA = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_MOE = {
    "dense_layers": "first_k_dense_replace",
    "num_experts": "n_routed_experts",
    "topk": "num_experts_per_tok",
    "shared_experts": "n_shared_experts",
    "expert_ffn_size": "moe_intermediate_size",
    "aux_loss": "aux_loss_alpha",
}
# Transformers normalizes MLA's latents with this epsilon, independent of the other norms.
LATENT_EPSILON = 1e-6
_GROUPS = "num_key_value_heads"
_FIXED: Values = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "q_lora_rank": (None,),
    "topk_method": ("greedy",),
    "scoring_func": ("softmax",),
    "norm_topk_prob": (False,),
    "routed_scaling_factor": (1.0,),
    "moe_layer_freq": (1,),
    "n_group": (None, 1),
}


def _read(config: Table) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    own: Values = {_GROUPS: (heads, None), "rms_norm_eps": (LATENT_EPSILON,)}
    refuse_others("config.json", config, own)
    published = write_names(tables.models()["deepseek2_lite"].moe, {"aux_loss": "aux_loss_alpha"})
    moe = read_names({**published, **config}, _MOE)
    return {"mla": Mla(**read_names(config, MLA)), "moe": Moe(**moe)}


def _write(shape: Shape) -> dict[str, Any]:
    fixed = {name: values[0] for name, values in _FIXED.items()}
    fixed |= {"seq_aux": True, "topk_group": 1, _GROUPS: shape.num_attention_heads}
    return fixed | write_names(shape.mla, MLA) | write_names(shape.moe, _MOE)


DEEPSEEK_V2 = Family(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    fixed=_FIXED,
    read=_read,
    write=_write,
    expresses=lambda shape: shape.mla is not None and shape.moe is not None,
    rope_kinds=("default", "yarn"),
    read_keys=frozenset({*MLA.values(), *_MOE.values(), _GROUPS}),
    # Transformers computes the sizes of heads from the other sizes, and reads groups of experts
    # for topk_method = group_limited_greedy only.
    ignored_keys=frozenset({"head_dim", "qk_head_dim", "topk_group"}),
)
