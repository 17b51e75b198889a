"""Load a GPT's checkpoint into a HybridModel, with its optimizer, or the other way round.

Upstream does the first at load time, but not for MLA, nor for blocks of which only some have
experts: a GPT saves those under the number of each block. Nothing is copied: the names under which
the loader looks for a model's tensors change. Names of block i become those of layers 2i and 2i+1.
"""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.nn import Module

from mqo.megatron.run.gpt_blocks import (
    FRESH,
    NUMBER,
    given_pattern,
    gpt_name,
    gpt_pattern,
    hybrid_name,
)
from mqo.megatron.run.unpickle import CheckpointError, tensor_names

# Arguments of a GPT whose pipeline stages have different numbers of blocks.
_UNEVEN = (
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    "pipeline_model_parallel_layout",
)
_ONLY_HYBRID = "output_layer._extra_state"
# The layers of a HybridModel whose checkpoint is read as that of a GPT.
_BLOCKS = object()
_reads_hybrid = False


@contextmanager
def reading_hybrid() -> Iterator[None]:
    """In this block, let a GPT load the checkpoint of a HybridModel."""
    global _reads_hybrid
    _reads_hybrid = True
    try:
        yield
    finally:
        _reads_hybrid = False


def layer_maps(args: Namespace, saved: Namespace, model: list[Module]) -> tuple[Any, bool]:
    """Return how to translate a checkpoint of the other class, and whether with its optimizer.

    The patched trainer calls this instead of upstream's function.

    Args:
        args: the arguments of this run.
        saved: those of the checkpoint.
        model: this rank's chunks, with or without wrappers.

    Returns:
        Upstream's maps for a GPT's checkpoint in a HybridModel, an own object for a HybridModel's
        in a GPT, None for one of the same class. Without translation, an optimizer loads as it is.

    Raises:
        CheckpointError: the layers of the model are not those of the checkpoint.
    """
    chunk = _bare(model[0])
    theirs = given_pattern(vars(saved))
    ours = given_pattern(vars(chunk))
    if ours is None and theirs is None:
        return None, False
    if ours is None:
        return _of_hybrid(chunk, str(theirs)), False
    of_gpt = theirs is None and hasattr(saved, "num_layers")
    layers = gpt_pattern(vars(saved)) if of_gpt else theirs
    same = ours if theirs else ours.replace(FRESH, "")
    if layers is not None and layers != same:
        kind = "of a GPT" if of_gpt else "of a HybridModel"
        raise CheckpointError(
            f"The checkpoint is that {kind} with the layers {layers}, and this model has the "
            f"layers {ours}. Expected: --hybrid-layer-pattern '{layers}', or the CHECKPOINT of a "
            "training with this model's layers"
        )
    if theirs is not None:
        return None, False
    fresh = args.finetune or args.no_load_optim or getattr(saved, "no_save_optim", False)
    return _of_gpt(ours), not fresh and not _has_same_buckets(saved, chunk.hybrid_layer_pattern)


def _has_same_buckets(saved: Namespace, pattern: str) -> bool:
    """Return whether a GPT's optimizer is saved by buckets, which are those of a HybridModel.

    Buckets have no names, but an order: that of the weights of a pipeline stage, the same in both
    classes. Upstream refuses buckets, because it allows patterns with more layers.
    """
    by_bucket = getattr(saved, "use_distributed_optimizer", False) and not getattr(
        saved, "dist_ckpt_optim_fully_reshardable", False
    )
    stages = saved.pipeline_model_parallel_size * (saved.virtual_pipeline_model_parallel_size or 1)
    sizes = list(map(len, pattern.split("|")))
    even = len(sizes) == stages and len(set(sizes)) == 1
    uneven = any(getattr(saved, name, None) for name in _UNEVEN)
    return by_bucket and even and not uneven and FRESH not in pattern


def _bare(module: Any) -> Any:
    """Return the model inside upstream's wrappers."""
    while not hasattr(module, "decoder") and hasattr(module, "module"):
        module = module.module
    return module


def _of_gpt(pattern: str) -> Any:
    """Return upstream's maps from the layers of a pattern to the blocks of a GPT."""
    from megatron.core.dist_checkpointing.gpt_checkpoint_interop import GPTCompatLayerMaps

    layers = list(enumerate(pattern))
    attention = [n for n, symbol in layers if symbol in "*+"]
    mlps = [n for n, symbol in layers if symbol in "-E"]
    return GPTCompatLayerMaps(
        attention_to_gpt={n: block for block, n in enumerate(attention)},
        mlp_to_gpt={n: block for block, n in enumerate(mlps)},
        fresh_init=frozenset(n for n, symbol in layers if symbol == FRESH),
        num_gpt_layers=len(attention),
    )


def _of_hybrid(gpt: Any, theirs: str) -> object:
    """Return the mark of a HybridModel's checkpoint, and let the GPT look for a name per block."""
    config = gpt.config
    ours = gpt_pattern(vars(config) | {"num_experts": config.num_moe_experts})
    if not _reads_hybrid or theirs != ours:
        raise CheckpointError(
            f"The checkpoint is that of a HybridModel with the layers {theirs}, and this model is "
            f"a GPT with the layers {ours}. Expected: --model-class hybrid, or the CHECKPOINT of a "
            "GPT"
        )
    config.hetereogenous_dist_checkpoint = True  # upstream's spelling
    return _BLOCKS


def retarget(state: Any, maps: Any, checkpoint: str) -> None:
    """Change the names under which the loader looks for tensors, in place.

    Args:
        state: upstream's sharded state of a model or of its optimizer.
        maps: the result of `layer_maps`.
        checkpoint: the folder of the iteration.
    """
    from megatron.core.dist_checkpointing import gpt_checkpoint_interop as upstream
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

    if maps is not _BLOCKS and not _names_blocks(checkpoint):
        upstream.retarget_sharded_state_dict_to_gpt_checkpoint(state, maps)
        return

    def renamed(entry: Any) -> Any:
        if not isinstance(entry, ShardedBase):
            return entry
        if maps is _BLOCKS:
            entry.key = hybrid_name(entry.key)
            return entry
        number = NUMBER.search(entry.key)
        if entry.key.endswith(_ONLY_HYBRID) or (number and int(number[1]) in maps.fresh_init):
            return LocalNonpersistentObject(entry.data)
        entry.key = gpt_name(entry.key, {**maps.attention_to_gpt, **maps.mlp_to_gpt})
        return entry

    dict_list_map_inplace(renamed, state)


def _names_blocks(checkpoint: str) -> bool:
    """Return whether a GPT's checkpoint has a name per block, instead of one for all blocks."""
    return any(map(NUMBER.search, tensor_names(Path(checkpoint))))
