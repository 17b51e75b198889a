"""Convert a model's shape between Hugging Face's config.json and the arguments of a checkpoint.

Each key of config.json is read here, or hf_keys.toml lists it as one that does not affect logits.
Any other key is refused. published_args.py does the same for a checkpoint's arguments.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mqo.errors import ConvertError
from mqo.matrix import tables
from mqo.matrix.tables import Dtype, Llama3Rope, Mla, Moe, Shape, Yarn

Values = dict[str, tuple[Any, ...]]
LLAMA, DEEPSEEK = "LlamaForCausalLM", "DeepseekV2ForCausalLM"
MODEL_TYPES = {LLAMA: "llama", DEEPSEEK: "deepseek_v2"}  # transformers chooses the class by these
_WITHOUT_EFFECT = Path(__file__).with_name("hf_keys.toml")
_OF_DEEPSEEK = "deepseek"
# {field: the values that a model may have}; the first is the default of a missing field.
_COMMON_ONLY: Values = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
}
_LLAMA_ONLY: Values = _COMMON_ONLY | {"rope_interleaved": (False,)}
_DEEPSEEK_ONLY: Values = _COMMON_ONLY | {
    "q_lora_rank": (None,),
    "topk_method": ("greedy",),
    "scoring_func": ("softmax",),
    "norm_topk_prob": (False,),
    "routed_scaling_factor": (1.0,),
    "moe_layer_freq": (1,),
    "n_group": (None, 1),
}
# {field of the shape or of a part of it: field of config.json}, for reading and writing.
_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "norm_epsilon": "rms_norm_eps",
}
_MLA = {
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
_ROPE = {"factor": "factor", "original": "original_max_position_embeddings"}
_LLAMA3 = _ROPE | {"low": "low_freq_factor", "high": "high_freq_factor"}
_YARN = _ROPE | {n: n for n in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")}
# Keys that `_common` and `_llama` read by name.
_READ = {"architectures", "model_type", "max_position_embeddings", "num_key_value_heads"}
_READ |= {"tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters"}
_ROPE_KINDS: Mapping[str, Mapping[str, str]] = {"default": {}, "llama3": _LLAMA3, "yarn": _YARN}
_ROPE_READ = {"rope_theta", "rope_type", "type"}
_YARN_ONLY: Values = {"attention_factor": (None,), "truncate": (True,)}
# Transformers normalizes MLA's latents with this epsilon, independent of the other norms.
_LATENT_EPSILON = 1e-6
_WHOLE_HEADS: Values = {"partial_rotary_factor": (1.0, None)}
_TORCH_DTYPES: Mapping[Dtype, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def shape_of_config(config: Mapping[str, Any]) -> Shape:
    """Return the shape of a config.json; ConvertError if its architecture is not supported."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConvertError(f"config.json has architectures = {names!r}", expected="a list of names")
    name = names[0] if names else ""
    convert = {LLAMA: _llama, DEEPSEEK: _deepseek}.get(name)
    if convert is None:
        raise ConvertError(
            f"config.json has the architecture {', '.join(names) or '(none)'}",
            expected=f"{LLAMA} or {DEEPSEEK}",
        )
    _refuse_others("config.json", config, {"model_type": (MODEL_TYPES[name],), **_WHOLE_HEADS})
    _refuse_unknown("config.json", config, known_keys(name))
    return _checked("config.json", convert, config)


@functools.cache
def keys_without_effect(architecture: str) -> frozenset[str]:
    """Return the keys of a config.json that do not affect logits."""
    lists = tomllib.loads(_WITHOUT_EFFECT.read_text(encoding="utf-8"))
    of_deepseek = lists.pop(_OF_DEEPSEEK)
    keys = {key for text in lists.values() for key in text.split()}
    return frozenset(keys | set(of_deepseek.split() if architecture == DEEPSEEK else ()))


def known_keys(architecture: str) -> frozenset[str]:
    """Return the keys of a config.json that are read or do not affect logits."""
    read = _READ | set(_SIZES.values()) | set(_WHOLE_HEADS)
    if architecture == LLAMA:
        read |= {*_LLAMA_ONLY, "head_dim"}
    else:
        read |= {*_MLA.values(), *_MOE.values(), *_DEEPSEEK_ONLY}
    return frozenset(read) | keys_without_effect(architecture)


def context_of(where: str, table: Mapping[str, Any]) -> int:
    """Return the context in tokens of a config.json, or of a checkpoint's arguments."""
    context = table.get("max_position_embeddings")
    if not isinstance(context, int) or context < 1:
        raise ConvertError(
            f"{where} has max_position_embeddings = {context!r}", expected="a number of tokens"
        )
    return context


def shape_of_args(args: Mapping[str, Any]) -> Shape:
    """Return the shape of a checkpoint's arguments; `vocab_size` is without padding rows.

    If the arguments do not have that number, because the tokenizer set it, padding rows count.
    """
    return _checked("The checkpoint", _of_args, args)


def config_of(shape: Shape, dtype: Dtype, sequence: int) -> dict[str, Any]:
    """Return the content of config.json, for a shape, the weights' dtype, the context in tokens."""
    common = {
        "architectures": [DEEPSEEK if shape.mla else LLAMA],
        "model_type": MODEL_TYPES[DEEPSEEK if shape.mla else LLAMA],
        "torch_dtype": _TORCH_DTYPES[dtype],
        **_written(shape, _SIZES),
        "num_key_value_heads": shape.num_query_groups or shape.num_attention_heads,
        "max_position_embeddings": sequence,
        "rope_theta": float(shape.rotary_base),
        "rope_scaling": _rope_table(shape.rope),
        "tie_word_embeddings": shape.tied_embeddings,
    }
    only = _DEEPSEEK_ONLY if shape.mla else _COMMON_ONLY
    fixed = {name: values[0] for name, values in only.items()}
    return common | fixed | _latent_table(shape)


def dtype_of_args(args: Mapping[str, Any]) -> Dtype:
    """Return the dtype of a checkpoint's weights."""
    return "bf16" if args.get("bf16") else "fp16" if args.get("fp16") else "fp32"


def _checked(
    where: str, convert: Callable[[Mapping[str, Any]], Shape], table: Mapping[str, Any]
) -> Shape:
    try:
        return convert(table)
    except KeyError as error:
        raise ConvertError(f"{where} lacks {error}", expected="all fields of its kind") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise ConvertError(f"{where}: {field} {first['input']!r}", expected=first["msg"]) from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        fault = f"{where} has a value of the wrong type: {error}"
        raise ConvertError(
            fault, expected="numbers and tables as transformers writes them"
        ) from None


def _refuse_others(where: str, table: Mapping[str, Any], only: Values) -> None:
    for name, values in only.items():
        value = table.get(name, values[0])
        if value not in values:
            raise ConvertError(
                f"{where} has {name} = {value!r}",
                expected=" or ".join(map(repr, values)),
                help="Other values cannot be converted",
            )


def _refuse_unknown(where: str, table: Mapping[str, Any], known: frozenset[str]) -> None:
    """Raise ConvertError for a key that may change the model in an unknown way."""
    for key, value in table.items():
        if key not in known and value is not None:
            raise ConvertError(
                f"{where} has {key} = {value!r}, an unknown key",
                expected="keys that Megatron's flags can express, or that do not affect logits",
                help="Remove the key if transformers computes the same logits without it",
            )


# -- from config.json ------------------------------------------------------------------------------


def _read(table: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: table[theirs] for ours, theirs in names.items()}


def _llama(config: Mapping[str, Any]) -> Shape:
    heads = config["num_attention_heads"]
    even = config["hidden_size"] // heads
    _refuse_others("config.json", config, _LLAMA_ONLY | {"head_dim": (even, None)})
    groups = config.get("num_key_value_heads")
    return Shape(**_common(config), num_query_groups=heads if groups is None else groups)


def _deepseek(config: Mapping[str, Any]) -> Shape:
    heads = config["num_attention_heads"]
    own: Values = {"num_key_value_heads": (heads, None), "rms_norm_eps": (_LATENT_EPSILON,)}
    _refuse_others("config.json", config, _DEEPSEEK_ONLY | own)
    published = _written(_published("deepseek2_lite").moe, {"aux_loss": "aux_loss_alpha"})
    mla, moe = _read(config, _MLA), _read({**published, **config}, _MOE)
    return Shape(**_common(config), mla=Mla(**mla), moe=Moe(**moe))


def _common(config: Mapping[str, Any]) -> dict[str, Any]:
    forms = [config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    if len(forms) > 1:
        both = "config.json has rope_parameters and rope_scaling"
        raise ConvertError(both, expected="only one of them")
    # The newer form includes the base.
    rope = {"rope_theta": config.get("rope_theta", 10000.0), **(forms[0] if forms else {})}
    return {
        **_read(config, _SIZES),
        "tied_embeddings": config.get("tie_word_embeddings", False),
        "rotary_base": rope["rope_theta"],
        "rope": _rope(rope),
    }


def _rope(table: Mapping[str, Any]) -> Llama3Rope | Yarn | None:
    """Return the scaling; ConvertError if upstream's flags cannot express it."""
    kind = table.get("rope_type") or table.get("type") or "default"
    _refuse_others("config.json", {"rope_type": kind}, {"rope_type": (*_ROPE_KINDS,)})
    only = _WHOLE_HEADS | (_YARN_ONLY if kind == "yarn" else {})
    where = "The rotary scaling in config.json"
    _refuse_others(where, table, only)
    _refuse_unknown(where, table, frozenset(_ROPE_READ | {*only, *_ROPE_KINDS[kind].values()}))
    if kind == "default":
        return None
    scaling: Llama3Rope | Yarn
    known: Llama3Rope | Yarn
    if kind == "llama3":
        scaling = llama3 = Llama3Rope(**_read(table, _LLAMA3))
        known = _llama3_rope(llama3.factor)
    else:
        scaling = yarn = Yarn(**_read({"beta_fast": 32, "beta_slow": 1, **table}, _YARN))
        known = _yarn(yarn.factor, yarn.mscale, yarn.mscale_all_dim)
    if scaling != known:
        raise ConvertError(
            f"config.json has the rotary scaling {scaling}",
            expected=f"{known}, which upstream's flags express",
        )
    return scaling


# -- what upstream has flags for -------------------------------------------------------------------


def _published(model: str) -> Any:
    return tables.models()[model]


def _llama3_rope(factor: int) -> Llama3Rope:
    rest = _published("llama31-8b").rope.model_dump(exclude={"factor"})
    return Llama3Rope(factor=factor, **rest)


def _yarn(factor: float, mscale: float, all_dim: float) -> Yarn:
    """Return YaRN's scaling; ConvertError if transformers and upstream compute it differently.

    If one mscale is 0, transformers uses 1 for both.
    """
    if not (mscale and all_dim) and (mscale, all_dim) != (1, 0):
        raise ConvertError(
            f"YaRN has mscale = {mscale} and mscale_all_dim = {all_dim}",
            expected="two numbers above 0, or 1 and 0, for which transformers and Megatron agree",
        )
    chosen = {"factor": factor, "mscale": mscale, "mscale_all_dim": all_dim}
    return Yarn(**_published("deepseek2_lite").rope.model_dump() | chosen)


# -- from a checkpoint's arguments -----------------------------------------------------------------


def _of_args(args: Mapping[str, Any]) -> Shape:
    latent = args.get("multi_latent_attention")
    even = args["hidden_size"] // args["num_attention_heads"]
    own: Values = {"layernorm_epsilon": (_LATENT_EPSILON,)}
    _refuse_others("The checkpoint", args, own if latent else {"kv_channels": (even, None)})
    groups = args["num_query_groups"] if args["group_query_attention"] else None
    same = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "rotary_base")
    return Shape(
        **{name: args[name] for name in same},
        num_query_groups=None if latent else groups or args["num_attention_heads"],
        vocab_size=args.get("vocab_size") or args["padded_vocab_size"],
        tied_embeddings=not args["untie_embeddings_and_output_weights"],
        norm_epsilon=args["layernorm_epsilon"],
        rope=_rope_of_args(args),
        mla=Mla(**{name: args[name] for name in _MLA}) if latent else None,
        moe=_moe_of_args(args) if latent else None,
    )


def _rope_of_args(args: Mapping[str, Any]) -> Llama3Rope | Yarn | None:
    if args.get("multi_latent_attention"):
        if args["rope_type"] != "yarn":
            if args.get("mscale_all_dim"):  # scales upstream's softmax even without YaRN
                _refuse_others("The checkpoint", args, {"rotary_scaling_factor": (1.0,)})
            return None
        return _yarn(args["rotary_scaling_factor"], args["mscale"], args["mscale_all_dim"])
    return _llama3_rope(args["rope_scaling_factor"]) if args["use_rope_scaling"] else None


def _moe_of_args(args: Mapping[str, Any]) -> Moe:
    width = args["moe_ffn_hidden_size"]
    layers, every = args["num_layers"], args["moe_layer_freq"]
    pattern = every if isinstance(every, list) else [int(i % every == 0) for i in range(layers)]
    dense = layers - sum(pattern)
    shared = args["moe_shared_expert_intermediate_size"]
    if pattern != [0] * dense + [1] * (layers - dense):
        raise ConvertError(
            f"The checkpoint has experts in the layers {pattern}",
            expected="all dense layers before the layers with experts",
        )
    if shared % width:
        raise ConvertError(
            f"The checkpoint's shared experts have {shared} channels, and the others {width}",
            expected=f"a multiple of {width}",
        )
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


def _written(part: Any, names: Mapping[str, str]) -> dict[str, Any]:
    return {theirs: getattr(part, ours) for ours, theirs in names.items()}


def _rope_table(rope: Llama3Rope | Yarn | None) -> dict[str, Any] | None:
    if rope is None:
        return None
    if isinstance(rope, Llama3Rope):
        frequencies = {name: float(value) for name, value in _written(rope, _LLAMA3).items()}
        return frequencies | {"rope_type": "llama3", _ROPE["original"]: rope.original}
    # Older readers use the older name of the type.
    kind = {"rope_type": "yarn", "type": "yarn"}
    return kind | _written(rope, _YARN) | {"factor": float(rope.factor)}


def _latent_table(shape: Shape) -> dict[str, Any]:
    """Return the fields of MLA and experts; for other models, the size of a head."""
    if shape.mla is None or shape.moe is None:
        return {"head_dim": shape.hidden_size // shape.num_attention_heads}
    fixed = {"seq_aux": True, "topk_group": 1}
    return _written(shape.mla, _MLA) | _written(shape.moe, _MOE) | fixed
