"""Refuse sizes that do not fit each other or the processes, before any process starts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from mqo.errors import LayoutError
from mqo.launch.command import read_flags
from mqo.launch.config import RunConfig
from mqo.launch.flags import shape_flags

PARALLEL = {
    f"{name}-parallel-size": 1
    for name in ("tensor-model", "pipeline-model", "context", "expert-model")
}
_SIZES = (
    *("expert-tensor-parallel-size", "num-layers", "hidden-size", "num-attention-heads"),
    *("kv-channels", "num-query-groups", "ffn-hidden-size", "num-experts", "moe-ffn-hidden-size"),
    *("seq-length", "max-position-embeddings", "micro-batch-size", "global-batch-size"),
    *("mamba-num-heads", "mamba-num-groups"),
)
# The flags that are checked, in the form of `read_flags`.
_CHECKED = {
    **PARALLEL,
    **dict.fromkeys(_SIZES, int),
    **dict.fromkeys(("sequence-parallel", "multi-latent-attention"), False),
}


def check_layout(config: RunConfig) -> None:
    """Raise LayoutError if the sizes, after the user's flags, cannot be built or split."""
    placed = config.placement
    sizes = read_sizes(shape_flags(config.experiment, placed.layout))
    fault = next(_faults(sizes, placed.cluster.processes), None)
    if fault:
        cause, expected, flags = fault
        raise LayoutError(cause, expected=expected, help=f"Change {flags}")
    hybrid = config.experiment.model.pattern is not None
    if hybrid and config.experiment.teacher and sizes.pipeline_model_parallel_size > 1:
        raise LayoutError(
            "A distillation does not support a HybridModel in pipeline stages",
            expected="--pipeline-model-parallel-size 1, or a GPT",
        )


def read_sizes(flags: Sequence[str]) -> argparse.Namespace:
    """Return the sizes in the flags; LayoutError if one is not a number."""
    return read_flags(flags, _CHECKED)


def _faults(args: argparse.Namespace, world: int) -> Iterator[tuple[str, str, str]]:
    """Yield (found, expected, flags to change) of each fault; the first one matters most."""
    yield from _shape_faults(args)
    tensor, context = args.tensor_model_parallel_size, args.context_parallel_size
    pipeline = args.pipeline_model_parallel_size
    ranks = tensor * pipeline * context
    tp = "--tensor-model-parallel-size"
    if min(ranks, args.expert_model_parallel_size) < 1:
        yield "A parallel size is below 1", "1 or more", "the --*-parallel-size that is below 1"
        return
    if world % ranks:
        yield (
            f"{world} processes do not fit tensor {tensor} x pipeline {pipeline} x context "
            f"{context} = {ranks}",
            f"a multiple of {ranks} processes",
            "--nproc-per-node, --nnodes or the parallel sizes",
        )
        return
    yield from _indivisible("attention heads", args.num_attention_heads, "tensor", tensor, tp)
    groups = args.num_query_groups
    if groups and groups % tensor and tensor % groups:
        yield (
            f"There are {groups} query groups and tensor {tensor}, and neither divides the other",
            "a tensor-parallel size that divides the groups, or a multiple of them",
            tp,
        )
    yield from _indivisible("MLP channels", args.ffn_hidden_size, "tensor", tensor, tp)
    if args.mamba_num_heads:
        yield from _mamba_faults(args, tensor, context)
    if args.sequence_parallel:
        yield from _indivisible("tokens", args.seq_length, "context x tensor", context * tensor, tp)
    if context > 1:
        text = "--context-parallel-size or --seq-length"
        yield from _indivisible("tokens", args.seq_length, "2 x context", 2 * context, text)
    step = args.micro_batch_size * (world // ranks)
    text = "--global-batch-size, --micro-batch-size or the number of processes"
    yield from _indivisible(
        "sequences", args.global_batch_size, "micro-batch x data-parallel ranks", step, text
    )
    if args.num_experts:
        yield from _expert_faults(args, world)


def _shape_faults(args: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Yield the faults of the model on any number of processes."""
    heads, groups = args.num_attention_heads, args.num_query_groups
    if min(heads, groups or 1) < 1:
        text = "--num-attention-heads or --num-query-groups"
        yield f"There are {heads} attention heads and {groups} query groups", "1 or more", text
        return
    if not args.multi_latent_attention and args.kv_channels is None:
        text = "--hidden-size or --num-attention-heads, or give --kv-channels"
        yield from _indivisible("channels of a layer", args.hidden_size, "heads", heads, text)
    if groups:
        text = "--num-attention-heads or --num-query-groups"
        yield from _indivisible("attention heads", heads, "query groups", groups, text)
    longest = args.max_position_embeddings
    if longest and args.seq_length > longest:
        yield (
            f"Sequences have {args.seq_length:,} tokens, and the model has {longest:,} positions",
            f"sequences of at most {longest:,} tokens",
            "--seq-length or --max-position-embeddings",
        )


def _mamba_faults(
    args: argparse.Namespace, tensor: int, context: int
) -> Iterator[tuple[str, str, str]]:
    """Yield the faults of Mamba layers, whose heads are split over context-parallel ranks, too."""
    flags, groups = "--tensor-model-parallel-size", args.mamba_num_groups
    yield from _indivisible("groups of Mamba heads", groups, "tensor", tensor, flags)
    flags = f"{flags} or --context-parallel-size"
    heads, ranks = args.mamba_num_heads, tensor * context
    yield from _indivisible("Mamba heads", heads, "tensor x context", ranks, flags)
    if groups % ranks and ranks % groups:
        yield (
            f"There are {groups} groups of Mamba heads and tensor x context {ranks}, and neither "
            "divides the other",
            "ranks that divide the groups, or a multiple of them",
            flags,
        )


def _expert_faults(args: argparse.Namespace, world: int) -> Iterator[tuple[str, str, str]]:
    experts = args.expert_model_parallel_size
    tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    ranks = experts * tensor * args.pipeline_model_parallel_size
    flags = "--expert-model-parallel-size or --expert-tensor-parallel-size"
    if world % ranks:
        yield (
            f"{world} processes do not fit expert {experts} x expert-tensor {tensor} x pipeline "
            f"{args.pipeline_model_parallel_size} = {ranks}",
            f"a multiple of {ranks} processes",
            flags,
        )
    yield from _indivisible("experts", args.num_experts, "expert", experts, flags)
    size = args.moe_ffn_hidden_size
    yield from _indivisible("expert channels", size, "expert-tensor", tensor, flags)


def _indivisible(
    parts: str, count: int | None, kind: str, by: int, flags: str
) -> Iterator[tuple[str, str, str]]:
    if count is not None and count % by:
        yield f"{count} {parts} cannot be divided by {kind} {by}", f"a multiple of {by}", flags
