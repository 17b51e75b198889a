"""Restore ModelOpt's state of a checkpoint before its weights, and save it with them.

Upstream does this only with megatron.post_training, which no wheel contains. ModelOpt takes about
ten seconds to import, so it is imported only if a model or a checkpoint has its state.
"""

import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from mqo.megatron.run.checkpoints import load_folder, newest
from mqo.megatron.run.files import MODELOPT_FORMAT as QUANTIZED_AS
from mqo.megatron.run.files import MODELOPT_STATE as STATE
from mqo.megatron.run.gpt_blocks import given_pattern
from mqo.megatron.run.saved_args import checked_arguments
from mqo.megatron.run.unpickle import CheckpointError, check_metadata, typed_errors

FORMAT = "torch_dist"
QUANTIZE_MODE = "quantize"  # of ModelOpt's state
_QUANTIZER = "modelopt.torch.quantization"


def restore(model: Module, args: Namespace) -> Module:
    """Change this rank's `model` as ModelOpt changed the model that upstream will load.

    Call this before the model is wrapped and the weights are loaded, because it adds the modules
    that need them. Without a state in the checkpoint nothing changes. A collective.

    Raises:
        CheckpointError: the pipeline is interleaved, which ModelOpt does not support; the model is
            a HybridModel, and the state that of a GPT; or the file would run code that no
            checkpoint needs.
    """
    folder = load_folder(args)
    if folder is None or not any(folder.glob(f"*/{STATE}")):
        return model
    checkpoint = newest(args)
    if checkpoint is None or not (checkpoint / STATE).is_dir():
        return model
    if args.virtual_pipeline_model_parallel_size:
        raise CheckpointError(
            f"{checkpoint} has ModelOpt's state, and the pipeline is interleaved. Expected: one "
            "chunk of layers per rank. Leave out --num-layers-per-virtual-pipeline-stage"
        )
    if pattern := given_pattern(vars(args)):
        raise CheckpointError(
            f"{checkpoint} has ModelOpt's state of a GPT, and this model is a HybridModel with the "
            f"layers {pattern}, which have other names. Expected: a GPT. Leave out --model-class "
            "hybrid"
        )
    check_metadata(checkpoint / STATE)
    from modelopt.torch.opt.plugins import restore_sharded_modelopt_state

    make_portable()
    with typed_errors():
        restore_sharded_modelopt_state([model], str(checkpoint))
    _keep_name(args, checkpoint)
    return model


def save(chunks: list[Module], checkpoint: str, ckpt_format: str) -> None:
    """Write ModelOpt's state of the unwrapped `chunks` into a checkpoint's folder. A collective.

    A model that ModelOpt did not change has no state. The state of a distillation is not saved.
    The patched trainer calls this before the checkpoint counts as complete.

    Raises:
        CheckpointError: the checkpoint format cannot store the state.
    """
    if "modelopt.torch.opt" not in sys.modules:
        return
    import modelopt.torch.opt as mto

    if not mto.ModeloptStateManager.is_converted(chunks[0]):
        return
    if not mto.modelopt_state(chunks[0])["modelopt_state_dict"]:
        return
    if ckpt_format != FORMAT:
        raise CheckpointError(
            f"--ckpt-format {ckpt_format} cannot store ModelOpt's state. Expected: {FORMAT}"
        )
    from modelopt.torch.opt.plugins import save_sharded_modelopt_state

    save_sharded_modelopt_state(chunks, checkpoint, (FORMAT, 1))


def _keep_name(args: Namespace, checkpoint: Path) -> None:
    """Record the model's format also in the checkpoints of this run."""
    from megatron.core.dist_checkpointing import load_common_state_dict

    before = checked_arguments(load_common_state_dict(str(checkpoint)).get("args", Namespace()))
    setattr(args, QUANTIZED_AS, getattr(before, QUANTIZED_AS, None))


def describe_state(state: Mapping[str, Any], name: str | None) -> dict[str, Any] | None:
    """Return {"format", "rules"} of ModelOpt's state; None if it quantizes nothing.

    `name` is the name of the format, None if another program quantized the model. Rules are pairs
    of a glob of LAYER.QUANTIZER and whether it is enabled; the last match counts.
    """
    modes = state.get("modelopt_state_dict", [])
    states = [entry for mode, entry in modes if mode == QUANTIZE_MODE]
    if not states:
        return None
    rows = states[-1]["config"]["quant_cfg"]
    # ModelOpt's own rows for a class of modules only disable modules that are not linear layers.
    known = isinstance(rows, list) and not any(r["parent_class"] and r["enable"] for r in rows)
    kept = [row for row in rows if not row["parent_class"]] if known else []
    rules = [(row["quantizer_name"], bool(row["enable"])) for row in kept]
    return {"format": name, "rules": rules}


def quantized_layers(chunks: Iterable[Module]) -> list[str]:
    """Return the paths of the modules with an enabled quantizer of ModelOpt."""
    return sorted(
        {
            re.sub(r"^(module\.)+", "", path.rpartition(".")[0])
            for chunk in chunks
            for path, module in chunk.named_modules()
            if type(module).__module__.startswith(_QUANTIZER)
            and getattr(module, "is_enabled", False)
        }
    )


def make_portable() -> None:
    """Make ModelOpt save and load quantizers without CUDA, where it would wait for a stream."""
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None
