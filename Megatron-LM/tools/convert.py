"""Convert weights between Hugging Face's safetensors and upstream's checkpoints, for `mqo convert`.

ModelOpt maps the names and layouts, and upstream saves and loads checkpoints; this program combines
them and compares the tensors: an additional or missing tensor or another shape is an error. It runs
as one process on the CPU, for a checkpoint of any layout. An HF folder already has its config.json;
a checkpoint must be new.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path[:1] = [str(ROOT / ".mqo_runtime"), str(ROOT)]
import preflight  # noqa: F401  (checks where megatron comes from)
from mqo.megatron.run.errors import SavedError
from mqo.megatron.run.hf_kind import StoredTensor, check_config, check_folder, stored_tensors

# argparse takes the last of several values.
ONE_PROCESS = [f"--{kind}-model-parallel-size=1" for kind in ("tensor", "pipeline", "expert")]
ONE_PROCESS += ["--context-parallel-size=1", "--micro-batch-size=1", "--global-batch-size=1"]
ONE_PROCESS += ["--train-iters=1", "--save-interval=1", "--lr=0", "--attention-backend=unfused"]
ONE_PROCESS += ["--no-save-optim", "--no-save-rng", "--no-load-optim", "--no-load-rng"]
ONE_PROCESS += ["--ckpt-format=torch_dist"]
TIED = ("lm_head.weight", "model.embed_tokens.weight")
# {architecture: another one with the same names and layouts of tensors, which ModelOpt knows}
MIXTRAL, MIXTRAL_LAYER = "MixtralForCausalLM", "model.layers.{}.block_sparse_moe."
SAME_NAMES = {"MistralForCausalLM": "LlamaForCausalLM", MIXTRAL: "LlamaForCausalLM"}
DTYPE_FLAGS: dict[str, list[str]] = {"F32": [], "BF16": ["--bf16"], "F16": ["--fp16"]}
LISTED = 8
SHARD = "5GB"
STAGES = 4


def describe(checkpoint: Path) -> dict[str, Any]:
    """Return the arguments of a checkpoint, and the parser's flags and defaults.

    Of a folder of checkpoints, the newest is read.
    """
    from megatron.inference.checkpointing import check_format, read_args
    from mqo.megatron.run.checkpoints import loaded
    from mqo.megatron.run.files import TRACKER
    from mqo.megatron.run.saved_args import check_kinds

    folder = loaded(checkpoint) if (checkpoint / TRACKER).is_file() else checkpoint
    check_format(folder)
    saved = vars(read_args(folder))
    check_kinds(saved, folder)
    facts = {"arguments": saved, "parser": parser_facts()}
    try:
        json.dumps(facts, default=str)  # as answer.py does, which would end with a traceback
    except (TypeError, ValueError, RecursionError) as error:
        raise SavedError(
            f"{folder} holds arguments that are not JSON values: {error}", "arguments of a training"
        ) from error
    return facts


def parser_facts() -> dict[str, dict[str, Any]]:
    """Return {name: {"flag", "default"}} of the arguments in upstream's parser."""
    from mqo.megatron.run.saved_args import upstream_parser

    return {
        name: {"flag": action.option_strings[0], "default": action.default}
        for name, action in upstream_parser().items()
    }


def to_megatron(source: Path, target: Path, flags: list[str]) -> None:
    """Write the weights of an HF folder as a checkpoint that a training starts from.

    Upstream calls it a release: weights without an optimizer, at iteration 0.
    """
    check_folder(source)
    check_config(source)
    stored = stored_tensors(source)
    stage("building the model", 1)
    args, model = build([*flags, *dtype_flags(stored)])
    from modelopt.torch.export import import_mcore_gpt_from_hf

    add_names()
    core = unwrapped(model)
    stage(f"comparing {len(stored)} tensors", 2)
    check_tensors(hf_tensors(core, source), without_copies(stored, core))
    stage(f"reading {len(stored)} tensors", 3)
    import_mcore_gpt_from_hf(core, str(source), dtype=args.params_dtype)
    save_release(args, model, target)


def save_release(args: Namespace, model: torch.nn.Module, target: Path) -> None:
    """Save the weights as a release, with hashes of its files."""
    from megatron.training.checkpointing import save_checkpoint
    from mqo.megatron.run.checkpoints import keep_last

    stage("writing the checkpoint", 4)
    args.save, args.verify_integrity = str(target), True
    save_checkpoint(0, [model], None, None, 0, release=True)
    keep_last(0)  # removes the mark of an unfinished save


def finalize(source: Path, target: Path, flags: list[str]) -> None:
    """Write the newest weights of a distilled student as a plain model's checkpoint, a release.

    Projections of the distillation, the optimizer and the random states are left out.
    """
    from megatron.inference import load_model
    from megatron.inference.checkpointing import read_args

    folder = load_model.find_checkpoint(source)
    stage("reading the checkpoint", 2)
    save_release(*load_model.load(folder, read_args(folder), flags), target)


def to_hf(source: Path, target: Path, flags: list[str]) -> None:
    """Write the weights of a checkpoint into `target`, in the dtype of its config.json.

    Raises:
        SavedError: ModelOpt quantizes the model; a value is too large for the dtype.
    """
    _, model = load([*flags, "--load", str(source)])
    from huggingface_hub import save_torch_state_dict
    from mqo.megatron.run.modelopt import quantized_layers
    from mqo.megatron.run.untrusted import read_json_object

    if layers := quantized_layers([model]):
        raise SavedError(
            f"ModelOpt quantizes {len(layers)} layers of {source}, for example {layers[0]}",
            "a checkpoint of a plain model",
            "Megatron-LM/examples/export/ptq_and_trtllm_export exports this checkpoint",
        )

    config = read_json_object(target / "config.json")
    dtype = getattr(torch, config["torch_dtype"])
    stage("renaming the tensors", 3)
    exported = hf_tensors(unwrapped(model), target)
    tensors = {name: cast(name, part, dtype) for name, part in exported.items()}
    stage(f"writing {len(tensors)} tensors", 4)
    save_torch_state_dict(tensors, target, max_shard_size=SHARD)


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of a tensor in `dtype`; raise SavedError if a finite value becomes infinite."""
    # Always a copy: some tensors share memory, which safetensors does not allow.
    copy = tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)
    if not torch.equal(copy.isfinite(), tensor.isfinite()):
        largest = tensor[tensor.isfinite()].abs().max().item()
        raise SavedError(
            f"{name} holds the value {largest:g}",
            f"values up to {torch.finfo(dtype).max:g}, the largest of {dtype}",
            "Use --dtype bf16 or fp32",
        )
    return copy


def stage(name: str, number: int) -> None:
    """Report the start of a stage, of STAGES."""
    from mqo.megatron.run.progress import advance

    advance(name, number, STAGES)


def load(flags: list[str]) -> tuple[Namespace, torch.nn.Module]:
    """Build the GPT of `flags`, and load the weights of the checkpoint that they name.

    That of a HybridModel with the same blocks loads, too.
    """
    stage("building the model", 1)
    args, model = build([*flags, "--finetune"])
    stage("reading the checkpoint", 2)
    from megatron.inference.one_process import load_weights
    from mqo.megatron.run.gpt_checkpoint import reading_hybrid

    with reading_hybrid():
        load_weights(model, args.load)
    return args, model


def hf_tensors(model: torch.nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights with the names and layouts of the architecture in config.json."""
    from modelopt.torch.export.unified_export_megatron import GPTModelExporter

    add_names()
    exporter = GPTModelExporter(model, str(folder), dtype=next(model.parameters()).dtype)
    layers = exporter.layer_state_dicts.values()
    return {name: tensor for layer in layers for name, tensor in layer.items()}


def add_names() -> None:
    """Add the architectures to ModelOpt's tables that it lacks."""
    from modelopt.torch.export.plugins import mcore_common, mcore_custom

    reading, writing = (
        mcore_common.all_mcore_hf_import_mapping,
        mcore_common.all_mcore_hf_export_mapping,
    )
    for table in (reading, writing):
        for name, same in SAME_NAMES.items():
            table.setdefault(name, dict(table[same]))
    names = {"gate_proj_name": "w1", "up_proj_name": "w3"}
    expert, whole = f"{MIXTRAL_LAYER}experts.{{}}.", mcore_custom.NameRemapping
    reading[MIXTRAL] |= {
        "router": whole(f"{MIXTRAL_LAYER}gate.", mcore_custom.REPLICATE),
        "local_experts.linear_fc1": mcore_custom.GatedMLPMerging(
            expert, mcore_custom.COL_ETP | names
        ),
        "local_experts.linear_fc2": whole(f"{expert}w2.", mcore_custom.ROW_ETP),
    }
    writing[MIXTRAL] |= {
        "router": whole(f"{MIXTRAL_LAYER}gate."),
        "local_experts.linear_fc1": mcore_custom.GatedMLPSlicing(expert, names),
        "local_experts.linear_fc2": whole(f"{expert}w2."),
    }


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model without wrappers."""
    from megatron.core.utils import unwrap_model

    return unwrap_model(model)


def dtype_flags(stored: Mapping[str, StoredTensor]) -> list[str]:
    """Return the flag of the tensors' common dtype; [], that of fp32, if they have several."""
    dtypes = {tensor.dtype for tensor in stored.values()}
    return DTYPE_FLAGS[dtypes.pop()] if len(dtypes) == 1 else []


def without_copies(
    stored: Mapping[str, StoredTensor], model: torch.nn.Module
) -> dict[str, StoredTensor]:
    """Leave out a tied head that is stored too, if it is bit-identical to the embedding."""
    rest = dict(stored)
    if model.share_embeddings_and_output_weights and set(TIED) <= stored.keys():
        head, embedding = (stored[name].read(name) for name in TIED)
        if torch.equal(head, embedding):
            del rest[TIED[0]]
    return rest


def check_tensors(expected: Mapping[str, torch.Tensor], stored: Mapping[str, StoredTensor]) -> None:
    """Raise SavedError unless the files have the tensors of the model, with the same shapes."""
    wrong = [
        f"{name} {list(stored[name].shape)} for {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in stored and stored[name].shape != tuple(tensor.shape)
    ]
    for kind, names in (
        ("tensors are missing", sorted(expected.keys() - stored.keys())),
        ("tensors are not of this model", sorted(stored.keys() - expected.keys())),
        ("tensors have another shape", wrong),
    ):
        if names:
            shown = ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")
            raise SavedError(
                f"{len(names)} {kind}: {shown}",
                f"the {len(expected)} tensors that config.json describes",
            )


def use_cpu() -> None:
    """Use the CPU, without other processes; call this before imports of megatron."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def build(flags: list[str]) -> tuple[Namespace, torch.nn.Module]:
    """Build the model of the flags with random weights; return the arguments and the model."""
    from megatron.inference import one_process
    from megatron.training import arguments

    sys.argv[1:] = [*flags, *ONE_PROCESS]
    args = arguments.parse_args()
    with one_process.typed_build_errors("These sizes"):
        arguments.validate_args(args)
        return args, one_process.build(args)
