"""A model's shape, as Hugging Face's config.json has it and as a checkpoint's arguments have it.

What a field would say that upstream's flags cannot is an error, never passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from mqo.errors import ConvertError
from mqo.matrix import tables
from mqo.matrix.tables import Dtype, Llama3Rope, Mla, Moe, Shape, Yarn

LLAMA, DEEPSEEK = "LlamaForCausalLM", "DeepseekV2ForCausalLM"
# {field: the values that a model may have}; the first is what a file without the field means.
_LLAMA_ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}
_DEEPSEEK_ONLY = _LLAMA_ONLY | {
    "q_lora_rank": (None,),
    "topk_method": ("greedy",),
    "scoring_func": ("softmax",),
    "norm_topk_prob": (False,),
    "routed_scaling_factor": (1.0,),
    "moe_layer_freq": (1,),
    "n_group": (None, 1),
}
# The same of upstream's arguments.
_ARGS_ONLY: Mapping[str, tuple[Any, ...]] = {
    "normalization": ("RMSNorm",),
    "swiglu": (True,),
    "add_bias_linear": (False,),
    "add_qkv_bias": (False,),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "experimental_attention_variant": (None,),
    "mtp_num_layers": (None, 0),
}
_GROUPS_ONLY = _ARGS_ONLY | {"qk_layernorm": (False,), "num_experts": (None,)}
_MLA_ONLY = _ARGS_ONLY | {
    "qk_layernorm": (True,),
    "q_lora_rank": (None,),
    "rope_type": ("yarn", "rope"),
    "moe_grouped_gemm": (False,),
    "moe_router_pre_softmax": (True,),
    "moe_router_score_function": ("softmax",),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_router_num_groups": (None, 1),
    "moe_router_enable_expert_bias": (False,),
    "moe_shared_expert_gate": (False,),
}
_TORCH_DTYPES: Mapping[Dtype, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def shape_of_config(config: Mapping[str, Any]) -> Shape:
    """The shape of a config.json; ConvertError where it is of no architecture known here."""
    names = config.get("architectures") or []
    made = {LLAMA: _llama, DEEPSEEK: _deepseek}.get(names[0] if names else "")
    if made is None:
        raise ConvertError(
            f"config.json names the architecture {', '.join(names) or '(none)'}",
            expected=f"{LLAMA} or {DEEPSEEK}",
        )
    return _checked("config.json", made, config)


def shape_of_args(args: Mapping[str, Any]) -> Shape:
    """The shape of a checkpoint's arguments; `vocab_size` without the rows that are padding.

    Where the arguments do not know how many those are (the tokenizer did), they count.
    """
    return _checked("the checkpoint", _of_args, args)


def config_of(shape: Shape, dtype: Dtype, sequence: int) -> dict[str, Any]:
    """The content of config.json: of a shape, the weights' dtype, and the context in tokens."""
    common = {
        "architectures": [DEEPSEEK if shape.mla else LLAMA],
        "model_type": "deepseek_v2" if shape.mla else "llama",
        "torch_dtype": _TORCH_DTYPES[dtype],
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups or shape.num_attention_heads,
        "max_position_embeddings": sequence,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_theta": float(shape.rotary_base),
        "rope_scaling": _rope_table(shape.rope),
        "tie_word_embeddings": shape.tied_embeddings,
    }
    only = _DEEPSEEK_ONLY if shape.mla else _LLAMA_ONLY
    fixed = {name: values[0] for name, values in only.items()}
    return common | fixed | _latent_table(shape)


def dtype_of_args(args: Mapping[str, Any]) -> Dtype:
    """Of a checkpoint's weights."""
    return "bf16" if args.get("bf16") else "fp16" if args.get("fp16") else "fp32"


def _checked(
    where: str, made: Callable[[Mapping[str, Any]], Shape], table: Mapping[str, Any]
) -> Shape:
    try:
        return made(table)
    except KeyError as error:
        raise ConvertError(f"{where} lacks {error}", expected="every field of its kind") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConvertError(f"{where}: {place} {first['input']!r}", expected=first["msg"]) from None


def _refuse_others(
    where: str, table: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]
) -> None:
    for name, values in only.items():
        found = table.get(name, values[0])
        if found not in values:
            raise ConvertError(
                f"{where} says {name} = {found!r}",
                expected=" or ".join(map(repr, values)),
                help="No other is converted",
            )


# -- from config.json ------------------------------------------------------------------------------


def _llama(config: Mapping[str, Any]) -> Shape:
    heads = config["num_attention_heads"]
    even = config["hidden_size"] // heads
    _refuse_others("config.json", config, _LLAMA_ONLY | {"head_dim": (even, None)})
    return Shape(
        **_common(config),
        num_query_groups=config.get("num_key_value_heads") or heads,
    )


def _deepseek(config: Mapping[str, Any]) -> Shape:
    _refuse_others("config.json", config, _DEEPSEEK_ONLY)
    published = tables.models()["deepseek2_lite"].moe
    return Shape(
        **_common(config),
        mla=Mla(
            kv_lora_rank=config["kv_lora_rank"],
            qk_head_dim=config["qk_nope_head_dim"],
            qk_pos_emb_head_dim=config["qk_rope_head_dim"],
            v_head_dim=config["v_head_dim"],
        ),
        moe=Moe(
            dense_layers=config["first_k_dense_replace"],
            num_experts=config["n_routed_experts"],
            topk=config["num_experts_per_tok"],
            shared_experts=config["n_shared_experts"],
            expert_ffn_size=config["moe_intermediate_size"],
            aux_loss=config.get("aux_loss_alpha", published and published.aux_loss),
        ),
    )


def _common(config: Mapping[str, Any]) -> dict[str, Any]:
    # The newer form holds the base, too.
    rope = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta", 10000.0),
        **(config.get("rope_scaling") or {}),
    }
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "vocab_size": config["vocab_size"],
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "norm_epsilon": config["rms_norm_eps"],
        "rotary_base": rope["rope_theta"],
        "rope": _rope(rope),
    }


def _rope(table: Mapping[str, Any]) -> Llama3Rope | Yarn | None:
    """The scaling; ConvertError where upstream's flags have no form for it."""
    made: Llama3Rope | Yarn
    published: Any
    match table.get("rope_type") or table.get("type") or "default":
        case "default":
            return None
        case "llama3":
            published = tables.models()["llama31-8b"].rope
            made = Llama3Rope(
                factor=table["factor"],
                low=table["low_freq_factor"],
                high=table["high_freq_factor"],
                original=table["original_max_position_embeddings"],
            )
            known = published.model_copy(update={"factor": made.factor})
        case "yarn":
            published = tables.models()["deepseek2_lite"].rope
            made = Yarn(
                factor=table["factor"],
                beta_fast=table.get("beta_fast", 32),
                beta_slow=table.get("beta_slow", 1),
                mscale=table["mscale"],
                mscale_all_dim=table["mscale_all_dim"],
                original=table["original_max_position_embeddings"],
            )
            free = made.model_dump(include={"factor", "mscale", "mscale_all_dim"})
            known = published.model_copy(update=free)
        case other:
            raise ConvertError(
                f"config.json says rope_type = {other!r}",
                expected="'default', 'llama3' or 'yarn'",
                help="No other is converted",
            )
    if made != known:
        raise ConvertError(
            f"config.json scales positions by {made}",
            expected=f"{known}, for which upstream has flags",
        )
    return made


# -- from a checkpoint's arguments -----------------------------------------------------------------


def _of_args(args: Mapping[str, Any]) -> Shape:
    latent = args.get("multi_latent_attention")
    even = args["hidden_size"] // args["num_attention_heads"]
    only = _MLA_ONLY if latent else _GROUPS_ONLY | {"kv_channels": (even, None)}
    _refuse_others("the checkpoint", args, only)
    groups = args["num_query_groups"] if args["group_query_attention"] else None
    return Shape(
        num_layers=args["num_layers"],
        hidden_size=args["hidden_size"],
        ffn_hidden_size=args["ffn_hidden_size"],
        num_attention_heads=args["num_attention_heads"],
        num_query_groups=None if latent else groups or args["num_attention_heads"],
        vocab_size=args.get("vocab_size") or args["padded_vocab_size"],
        tied_embeddings=not args["untie_embeddings_and_output_weights"],
        norm_epsilon=args["layernorm_epsilon"],
        rotary_base=args["rotary_base"],
        rope=_rope_of_args(args),
        mla=_mla_of_args(args) if latent else None,
        moe=_moe_of_args(args) if latent else None,
    )


def _rope_of_args(args: Mapping[str, Any]) -> Llama3Rope | Yarn | None:
    published: Any
    if args.get("multi_latent_attention"):
        published = tables.models()["deepseek2_lite"].rope
        names = {"mscale": "mscale", "mscale_all_dim": "mscale_all_dim"}
        names |= {"factor": "rotary_scaling_factor"}
        return (
            Yarn(
                **published.model_dump(exclude=set(names)),
                **{ours: args[theirs] for ours, theirs in names.items()},
            )
            if args["rope_type"] == "yarn"
            else None
        )
    published = tables.models()["llama31-8b"].rope
    factor = {"factor": args["rope_scaling_factor"]}
    scaled = args["use_rope_scaling"]
    return Llama3Rope(**published.model_dump(exclude={"factor"}), **factor) if scaled else None


def _mla_of_args(args: Mapping[str, Any]) -> Mla:
    return Mla(**{name: args[name] for name in Mla.model_fields})


def _moe_of_args(args: Mapping[str, Any]) -> Moe:
    width = args["moe_ffn_hidden_size"]
    layers, every = args["num_layers"], args["moe_layer_freq"]
    pattern = every if isinstance(every, list) else [int(i % every == 0) for i in range(layers)]
    dense = layers - sum(pattern)
    shared = args["moe_shared_expert_intermediate_size"]
    if pattern != [0] * dense + [1] * (layers - dense):
        raise ConvertError(f"the checkpoint has experts in the layers {pattern}", expected="last")
    if shared % width:
        raise ConvertError(f"the checkpoint's shared experts are {shared} wide, others {width}")
    coefficient = args["moe_aux_loss_coeff"]
    return Moe(
        dense_layers=dense,
        num_experts=args["num_experts"],
        topk=args["moe_router_topk"],
        shared_experts=shared // width,
        expert_ffn_size=width,
        aux_loss=coefficient[0] if isinstance(coefficient, list) else coefficient,
    )


# -- to config.json --------------------------------------------------------------------------------


def _rope_table(rope: Llama3Rope | Yarn | None) -> dict[str, Any] | None:
    if rope is None:
        return None
    common = {"factor": float(rope.factor), "original_max_position_embeddings": rope.original}
    if isinstance(rope, Llama3Rope):
        ends = {"low_freq_factor": float(rope.low), "high_freq_factor": float(rope.high)}
        return {"rope_type": "llama3", **common, **ends}
    scales = {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
    ends = {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
    # Older readers know the type by its older name.
    return {"rope_type": "yarn", "type": "yarn", **common, **ends, **scales}


def _latent_table(shape: Shape) -> dict[str, Any]:
    """What only a model with MLA and experts has; the others name their heads' size."""
    if shape.mla is None or shape.moe is None:
        return {"head_dim": shape.hidden_size // shape.num_attention_heads}
    return {
        "kv_lora_rank": shape.mla.kv_lora_rank,
        "qk_nope_head_dim": shape.mla.qk_head_dim,
        "qk_rope_head_dim": shape.mla.qk_pos_emb_head_dim,
        "v_head_dim": shape.mla.v_head_dim,
        "first_k_dense_replace": shape.moe.dense_layers,
        "n_routed_experts": shape.moe.num_experts,
        "num_experts_per_tok": shape.moe.topk,
        "n_shared_experts": shape.moe.shared_experts,
        "moe_intermediate_size": shape.moe.expert_ffn_size,
        "aux_loss_alpha": shape.moe.aux_loss,
        "seq_aux": True,
        "topk_group": 1,
    }
