"""Read a teacher's architecture from model_config.yaml or its checkpoint."""

import difflib
from argparse import Namespace
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

from mqo.megatron.run.args_table import read_table
from mqo.megatron.run.errors import DistillationError
from mqo.megatron.run.files import TRACKER
from mqo.megatron.run.gpt_blocks import PATTERN
from mqo.megatron.run.saved_args import check_kinds, model_arguments

from ..algos.distillation import read_mapping
from ..checkpointing import checkpoint_folder, read_arguments

MODEL_CONFIG = "model_config.yaml"
NEEDED = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
# Arguments that describe a model. All others say how it runs: they are the student's.
_OF_STUDENT = {"bf16", "fp16", "mtp_num_layers", "mtp_hybrid_override_pattern"}
_NUMERICS = {"apply_query_key_layer_scaling", "moe_router_dtype"}
# Names in releases before 0.19.
EPSILONS = ("layernorm_epsilon", "norm_epsilon")
_OLDER = {"norm_epsilon", "apply_layernorm_1p", "beta_fast", "beta_slow"}
_OLDER |= {"original_max_position_embeddings"}
# Arguments that are compared with the student's.
FITTED = ("padded_vocab_size", "vocab_size", "seq_length", "max_position_embeddings")
ARCHITECTURE = tuple(
    sorted(
        (read_table().model | read_table().no_effect["gated"] | _NUMERICS | _OLDER)
        - read_table().unsupported.union(FITTED, _OF_STUDENT)
    )
)
# NeMo's names: {NeMo's: (Megatron's, conversion of the value)}.
RENAMED = {
    "bias": ("add_bias_linear", bool),
    "activation": ("swiglu", lambda name: name in ("swiglu", "fast-swiglu")),
    "encoder_seq_length": ("seq_length", int),
    **dict.fromkeys(EPSILONS, (EPSILONS[0], float)),
    "rotary_base": ("rotary_base", int),
    "rotary_percentage": ("rotary_percent", float),
    "share_embeddings_and_output_weights": ("untie_embeddings_and_output_weights", lambda x: not x),
    "num_moe_experts": ("num_experts", int),
    "normalization": ("normalization", lambda name: {"rmsnorm": "RMSNorm"}.get(name, name)),
}


def load_teacher_config(folder: str, args: Namespace) -> Namespace:
    """Return the arguments of the teacher in `folder`: its architecture, otherwise the student's.

    The architecture comes from model_config.yaml, in Megatron's or NeMo's names, or, without such a
    file, from the arguments in the checkpoint.

    Raises:
        DistillationError: the checkpoint is missing or does not describe the teacher; its
            vocabulary or its sequence length does not fit the student's.
        CheckpointError: an argument is unknown, of another kind or out of range.
    """
    if checkpoint_folder(folder) is None:
        raise DistillationError(
            f"{folder} has no checkpoint of a teacher",
            expected=f"{TRACKER} in it, and the folder that it names",
        )
    path = Path(folder) / MODEL_CONFIG
    given = _read_yaml(path) if path.exists() else _read_checkpoint(folder)
    missing = [name for name in NEEDED if given.get(name) is None]
    if missing:
        raise DistillationError(
            f"{folder} does not give the teacher's {', '.join(missing)}",
            expected=f"{', '.join(NEEDED)} in {MODEL_CONFIG} next to its checkpoint",
        )
    _check_fit(given, args)
    teacher = copy(args)
    # The student's values would be wrong; upstream derives the first from the teacher's sizes.
    teacher.kv_channels = None
    vars(teacher)[PATTERN] = None
    vars(teacher).update({name: given[name] for name in ARCHITECTURE if name in given})
    return teacher


def _read_checkpoint(folder: str) -> dict[str, Any]:
    help = f"Describe the teacher in {folder}/{MODEL_CONFIG}"
    saved = read_arguments(folder)
    return model_arguments(saved, f"The teacher in {folder}", help=help) if saved else {}


def _read_yaml(path: Path) -> dict[str, Any]:
    content = read_mapping(path, ", ".join(NEEDED))
    given: dict[str, Any] = {}
    translate: Any
    for name, value in content.items():
        ours, translate = RENAMED.get(name, (name, lambda x: x))
        try:
            given[ours] = value if value is None else translate(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise DistillationError(f"{path} has {name} = {value!r:.80}: {error}") from error
    _check_spelling(path, given)
    check_kinds({name: value for name, value in given.items() if value is not None}, path)
    given |= {name: given[EPSILONS[0]] for name in EPSILONS if EPSILONS[0] in given}
    layers = given.get("heterogeneous_layers_config_path")
    if layers:
        given["heterogeneous_layers_config_path"] = str(path.parent / layers)
        given["heterogeneous_layers_config_encoded_json"] = None
    if given.get("num_query_groups"):
        given["group_query_attention"] = True
    return given


def _check_spelling(path: Path, given: Mapping[str, Any]) -> None:
    """Raise DistillationError for a misspelled name; a NeMo file may have unknown names."""
    known = (*ARCHITECTURE, *FITTED)
    for name in given:
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.92)
        if near and name not in known:
            raise DistillationError(f"{path} has the unknown key {name}", expected=near[0])


def _check_fit(given: Mapping[str, Any], args: Namespace) -> None:
    # Padding depends on the layout: compare it only if the vocabulary sizes are not known.
    sizes = [(n, given.get(n), getattr(args, n, None)) for n in ("vocab_size", "padded_vocab_size")]
    for name, theirs, ours in [size for size in sizes if size[1] and size[2]][:1]:
        if theirs != ours:
            raise DistillationError(
                f"The teacher's {name} is {theirs}, the student's {ours}",
                expected="the same vocabulary, because logits are compared",
                help="Train both with the same tokenizer",
            )
    longest = given.get("max_position_embeddings") or given.get("seq_length")
    if longest and longest < args.seq_length:
        raise DistillationError(
            f"The teacher has {longest} positions, a student's sequence {args.seq_length} tokens",
            expected="a teacher with sequences at least as long as the student's",
            help=f"Pass --seq-length {longest}",
        )
