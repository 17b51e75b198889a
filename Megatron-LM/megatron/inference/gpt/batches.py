"""The data of a GPT program: its datasets, and each rank's part of a micro-batch."""

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.training import get_args, get_tokenizer, print_rank_0
from mqo.megatron.device import accelerator_type
from mqo.megatron.run.index_cache import naming_damage

from . import releases

Batch = dict[str, Any]  # tensors; None on a stage that gets no data


def get_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """Return this rank's part of the next micro-batch: [micro-batch, sequence], on its device.

    Tensor-parallel rank 0 reads and broadcasts; stages between the first and the last get no data.
    With --dataloader-inter-document-masking the sequences are concatenated, [1, micro-batch *
    sequence], and every stage gets the ends of the documents, "cu_seqlens".
    """
    names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    args, batch = get_args(), dict.fromkeys(names)
    if not releases.is_first_or_last_pipeline_stage(vp_stage) and not packs(args):
        return batch
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        loaded = next(data_iterator)
        batch |= {k: v.to(accelerator_type(), non_blocking=True) for k, v in loaded.items()}
    return releases.share_batch(batch, args, packed=packs(args))


def packs(args: Namespace) -> bool:
    """Return whether the ends of documents are passed on, so that documents do not mix."""
    return getattr(args, "dataloader_inter_document_masking", False)


def check_documents(args: Namespace) -> None:
    """Raise ValueError if attention would mix documents that flags keep apart."""
    stages = args.pipeline_model_parallel_size
    if packs(args) and (
        args.context_parallel_size > 1 or (stages > 1 and args.micro_batch_size > 1)
    ):
        raise ValueError(
            "--dataloader-inter-document-masking works only without context parallelism, and with "
            "pipeline stages only for micro-batches of one sequence: pass "
            "--context-parallel-size 1 --micro-batch-size 1"
        )
    chunks = stages * (args.virtual_pipeline_model_parallel_size or 1)
    if args.reset_attention_mask and chunks > 2:
        raise ValueError(
            "--reset-attention-mask makes a mask only for the first and the last pipeline stage, "
            f"and there are {chunks}: pass --dataloader-inter-document-masking instead, or "
            "--pipeline-model-parallel-size 2"
        )


def packed_params(batch: Batch) -> PackedSeqParams | None:
    """Return the documents of a batch for the model; None if the batch is not packed."""
    if batch.get("cu_seqlens") is None:
        return None
    ends, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"].max())
    if torch.is_grad_enabled():  # evaluation does not count for the FLOPs of a step
        from megatron.training.training import update_seqlen_stats_from_cu_seqlens  # from 0.19 on

        update_seqlen_stats_from_cu_seqlens(ends)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def datasets_provider(samples: list[int], vp_stage: int | None = None) -> tuple:
    """Build the train, validation and test datasets with `samples` sequences each."""
    args = get_args()
    blend, blend_per_split = releases.get_blend_and_blend_per_split(args)
    packed = {"inter_document_masking": True} if packs(args) else {}
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        **packed,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    print_rank_0("> building train, validation, and test datasets ...")
    prefixes = [prefix for part in (blend_per_split or [blend]) if part for prefix in part[0]]
    with naming_damage(args.data_cache_path, prefixes):
        return BlendedMegatronDatasetBuilder(
            kind, samples, partial(_reads_data, vp_stage=vp_stage), config
        ).build()


def _reads_data(vp_stage: int | None) -> bool:
    first = mpu.get_tensor_model_parallel_rank() == 0
    return first and (releases.is_first_or_last_pipeline_stage(vp_stage) or packs(get_args()))
