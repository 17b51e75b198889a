"""Convert a model's shape between Hugging Face's config.json and the arguments of a checkpoint.

Each key of config.json is read here or by its family (families/), or hf_keys.toml lists it as one
that does not affect logits. Any other key is refused. published_args.py does the same for a
checkpoint's arguments.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mqo.errors import ConvertError
from mqo.launch.families import family_of_config, family_of_shape
from mqo.launch.families.deepseek_v2 import LATENT_EPSILON, MLA
from mqo.launch.families.family import Family, Values, read_names, refuse_others, write_names
from mqo.launch.families.nemotron_h import GATED_EPSILON
from mqo.matrix import tables
from mqo.matrix.tables import Dtype, Llama3Rope, Mamba, Mla, Moe, Shape, Yarn
from mqo.megatron.run.gpt_blocks import given_pattern

_WITHOUT_EFFECT = Path(__file__).with_name("hf_keys.toml")
# {field of the shape's rope: key of config.json}, for reading and writing.
_ROPE = {"factor": "factor", "original": "original_max_position_embeddings"}
_LLAMA3 = _ROPE | {"low": "low_freq_factor", "high": "high_freq_factor"}
_YARN = _ROPE | {n: n for n in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")}
# Keys that are read by name for every family.
_READ = {"architectures", "model_type", "max_position_embeddings", "tie_word_embeddings"}
_READ |= {"rope_theta", "rope_scaling", "rope_parameters"}
_ROPE_KEYS: Mapping[str, Mapping[str, str]] = {"default": {}, "llama3": _LLAMA3, "yarn": _YARN}
_ROPE_READ = {"rope_theta", "rope_type", "type"}
_YARN_ONLY: Values = {"attention_factor": (None,), "truncate": (True,)}
_WHOLE_HEADS: Values = {"partial_rotary_factor": (1.0, None)}
_TORCH_DTYPES: Mapping[Dtype, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def shape_of_config(config: Mapping[str, Any]) -> Shape:
    """Return the shape of a config.json; ConvertError if its architecture is not supported."""
    family = family_of_config(config)
    where, config = "config.json", family.with_defaults(config)
    only = {"model_type": (family.model_type,), **_WHOLE_HEADS, **family.fixed}
    refuse_others(where, config, only)
    _refuse_unknown(where, config, known_keys(family))
    with _typed_errors(where):
        return Shape(
            **read_names(config, family.sizes),
            tied_embeddings=config.get("tie_word_embeddings", False),
            **_positions(family, config),
            **family.read(config),
        )


@functools.cache
def keys_without_effect() -> frozenset[str]:
    """Return the keys of a config.json that do not affect logits in any family."""
    lists = tomllib.loads(_WITHOUT_EFFECT.read_text(encoding="utf-8"))
    return frozenset(key for text in lists.values() for key in text.split())


def notes_on(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return notes for the user whose weights of this config.json are converted."""
    family = family_of_config(config)
    return family.notes(family.with_defaults(config))


def known_keys(family: Family) -> frozenset[str]:
    """Return the keys of a config.json that are read or do not affect logits."""
    keys = _READ | {*family.sizes.values(), *_WHOLE_HEADS, *family.fixed, *family.defaults}
    return keys_without_effect().union(keys, family.read_keys, family.ignored_keys)


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
    same = ("hidden_size", "ffn_hidden_size", "num_attention_heads")
    with _typed_errors("The checkpoint"):
        latent = args.get("multi_latent_attention")
        return Shape(
            **{name: args[name] for name in same},
            **_layers_of_args(args),
            vocab_size=args.get("vocab_size") or args["padded_vocab_size"],
            tied_embeddings=not args["untie_embeddings_and_output_weights"],
            norm_epsilon=args["layernorm_epsilon"],
            **(_latent_of_args if latent else _heads_of_args)(args),
        )


def config_of(shape: Shape, dtype: Dtype, sequence: int) -> dict[str, Any]:
    """Return the content of config.json, for a shape, the weights' dtype, the context in tokens.

    Raises:
        ConvertError: no architecture expresses the shape.
    """
    family = family_of_shape(shape)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": _TORCH_DTYPES[dtype],
        **write_names(shape, family.sizes),
        "max_position_embeddings": sequence,
        **_written_positions(shape),
        "tie_word_embeddings": shape.tied_embeddings,
        **({"hidden_act": "silu"} if shape.activation == "swiglu" else {}),
        **family.write(shape),
    }


def dtype_of_args(args: Mapping[str, Any]) -> Dtype:
    """Return the dtype of a checkpoint's weights."""
    return "bf16" if args.get("bf16") else "fp16" if args.get("fp16") else "fp32"


@contextmanager
def _typed_errors(where: str) -> Iterator[None]:
    """Raise ConvertError for what a damaged table makes its readers raise."""
    try:
        yield
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


def _positions(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base and the scaling of rotary positions; {} for a family without them."""
    if not family.rope_kinds:
        return {}
    forms = [config[key] for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    if len(forms) > 1:
        both = "config.json has rope_parameters and rope_scaling"
        raise ConvertError(both, expected="only one of them")
    # The newer form includes the base.
    rope = {"rope_theta": config.get("rope_theta", 10000.0), **(forms[0] if forms else {})}
    return {"rotary_base": rope["rope_theta"], "rope": _rope(rope, family.rope_kinds)}


def _rope(table: Mapping[str, Any], kinds: tuple[str, ...]) -> Llama3Rope | Yarn | None:
    """Return the scaling; ConvertError if upstream's flags cannot express it."""
    kind = table.get("rope_type") or table.get("type") or "default"
    refuse_others("config.json", {"rope_type": kind}, {"rope_type": kinds})
    only = _WHOLE_HEADS | (_YARN_ONLY if kind == "yarn" else {})
    where = "The rotary scaling in config.json"
    refuse_others(where, table, only)
    _refuse_unknown(where, table, frozenset(_ROPE_READ | {*only, *_ROPE_KEYS[kind].values()}))
    if kind == "default":
        return None
    scaling: Llama3Rope | Yarn
    known: Llama3Rope | Yarn
    if kind == "llama3":
        scaling = llama3 = Llama3Rope(**read_names(table, _LLAMA3))
        known = _llama3_rope(llama3.factor)
    else:
        scaling = yarn = Yarn(**read_names({"beta_fast": 32, "beta_slow": 1, **table}, _YARN))
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


def _layers_of_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the blocks and positions of a GPT, or the layers of a model with Mamba layers."""
    pattern = given_pattern(args)
    if pattern is None:
        rotary = {"rotary_base": args["rotary_base"], "rope": _rope_of_args(args)}
        return {"num_layers": args["num_layers"], **rotary}
    refuse_others("The checkpoint", args, {"layernorm_epsilon": (GATED_EPSILON,)})
    mamba = Mamba(**{name: args[f"mamba_{name}"] for name in Mamba.model_fields})
    return {"pattern": pattern, "activation": "squared_relu", "mamba": mamba}


def _latent_of_args(args: Mapping[str, Any]) -> dict[str, Any]:
    refuse_others("The checkpoint", args, {"layernorm_epsilon": (LATENT_EPSILON,)})
    return {"mla": Mla(**{name: args[name] for name in MLA}), "moe": _moe_of_args(args)}


def _heads_of_args(args: Mapping[str, Any]) -> dict[str, Any]:
    heads, size = args["num_attention_heads"], args.get("kv_channels")
    return {
        "num_query_groups": args["num_query_groups"] if args["group_query_attention"] else heads,
        "head_dim": size if size and size * heads != args["hidden_size"] else None,
        "qkv_bias": bool(args.get("add_qkv_bias")),
        "qk_norm": bool(args.get("qk_layernorm")),
        "moe": _moe_of_args(args) if args.get("num_experts") else None,
    }


def _rope_of_args(args: Mapping[str, Any]) -> Llama3Rope | Yarn | None:
    if args.get("multi_latent_attention"):
        if args["rope_type"] != "yarn":
            if args.get("mscale_all_dim"):  # scales upstream's softmax even without YaRN
                refuse_others("The checkpoint", args, {"rotary_scaling_factor": (1.0,)})
            return None
        return _yarn(args["rotary_scaling_factor"], args["mscale"], args["mscale_all_dim"])
    return _llama3_rope(args["rope_scaling_factor"]) if args["use_rope_scaling"] else None


def _moe_of_args(args: Mapping[str, Any]) -> Moe:
    width = args["moe_ffn_hidden_size"]
    layers, every = args["num_layers"], args["moe_layer_freq"]
    pattern = every if isinstance(every, list) else [int(i % every == 0) for i in range(layers)]
    dense = layers - sum(pattern)
    shared = args["moe_shared_expert_intermediate_size"] or 0
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
        renormalized=not args.get("moe_router_pre_softmax"),
    )


# -- to config.json --------------------------------------------------------------------------------


def _written_positions(shape: Shape) -> dict[str, Any]:
    if shape.rotary_base is None:
        return {}
    return {"rope_theta": float(shape.rotary_base), "rope_scaling": _rope_table(shape.rope)}


def _rope_table(rope: Llama3Rope | Yarn | None) -> dict[str, Any] | None:
    if rope is None:
        return None
    if isinstance(rope, Llama3Rope):
        frequencies = {name: float(value) for name, value in write_names(rope, _LLAMA3).items()}
        return frequencies | {"rope_type": "llama3", _ROPE["original"]: rope.original}
    # Older readers use the older name of the type.
    kind = {"rope_type": "yarn", "type": "yarn"}
    return kind | write_names(rope, _YARN) | {"factor": float(rope.factor)}
