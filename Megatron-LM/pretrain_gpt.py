"""Pre-train a GPT with upstream's trainer and flags.

The wheel lacks this program: it reads batches, computes the loss, and builds the datasets and the
model. Everything else (arguments, schedules, checkpoints, the training loop) is in
megatron.training.
"""

# First, for its check: no other megatron may be imported instead of this tree's.
import preflight  # isort: skip

preflight.disable_gc(__name__)

import gc
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import mqo.megatron.hooks
import mqo.megatron.run.engine
import mqo.megatron.run.modelopt
import mqo.megatron.run.start
import torch

mqo.megatron.run.start.compile_late()

from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import (
    get_args,
    get_tensorboard_writer,
    get_timers,
    get_tokenizer,
    pretrain,
    print_rank_0,
    set_startup_timestamps,
)
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec
from megatron.training.utils.common_utils import (
    get_blend_and_blend_per_split,
    is_first_or_last_pipeline_stage,
)
from mqo.megatron.attention.spec import with_local_attention
from mqo.megatron.device import accelerator_type
from mqo.megatron.layers import label_layers
from mqo.megatron.run.index_cache import naming_damage
from mqo.megatron.transformer_engine.releases import NAME as ENGINE
from mqo.quant.config import current
from mqo.quant.formats import ATTENTION
from torch import Tensor

Batch = dict[str, Any]  # tensors; None on a stage that gets no data


def get_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """Return this rank's part of the next micro-batch: [micro-batch, sequence], on its device.

    Tensor-parallel rank 0 reads and broadcasts; stages between the first and the last get no data.
    With --dataloader-inter-document-masking the sequences are concatenated, [1, micro-batch *
    sequence], and every stage gets the ends of the documents, "cu_seqlens".
    """
    names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    args, batch = get_args(), dict.fromkeys(names)
    if not is_first_or_last_pipeline_stage(vp_stage) and not packs(args):
        return batch
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        loaded = next(data_iterator)
        batch |= {k: v.to(accelerator_type(), non_blocking=True) for k, v in loaded.items()}
    sizes = {
        "micro_batch_size": args.micro_batch_size,
        "seq_length": args.seq_length,
        "cp_size": args.context_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
    }
    rank = {
        "tp_rank": mpu.get_tensor_model_parallel_rank(),
        "broadcast_src_rank": mpu.get_tensor_model_parallel_src_rank(),
        "broadcast_group": mpu.get_tensor_model_parallel_group(),
        "is_pipeline_first_stage": mpu.is_pipeline_first_stage(),
        "is_pipeline_last_stage": mpu.is_pipeline_last_stage(),
    }
    # No multi-token prediction.
    kind = {"has_cu_seqlens": packs(args), "is_hybrid_cp": False, "mtp_on_this_rank": False}
    mask = args.create_attention_mask_in_dataloader
    batch = get_batch_on_this_tp_rank(
        batch, create_attention_mask_in_dataloader=mask, **sizes, **rank, **kind
    )
    if packs(args):
        from megatron.core.utils import flatten_batch_for_packed_sequences  # from 0.19 on

        return flatten_batch_for_packed_sequences(batch)
    group = mpu.get_context_parallel_group()
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)


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


def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the masked sum of the token losses, the number of tokens, and both for the report.

    `output_tensor`: [micro-batch, sequence], the cross entropy of each token in nats. Upstream's
    schedule divides by the tokens, and its report averages over the data-parallel ranks.
    """
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output_tensor.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    check_loss(loss)
    report = torch.cat([loss.detach().view(1), tokens.view(1)])
    return loss, tokens, {"lm loss": report}


def check_loss(loss: Tensor) -> None:
    """End the run if the loss is NaN or infinite, unless this check is turned off.

    In training, upstream's rerun state machine records it, and all ranks end after the backward
    passes (mqo.megatron.hooks.end_if_diverged). If the machine is disabled, as in validation,
    raise DivergenceError.
    """
    if not get_args().check_for_nan_in_loss_and_grad:
        return
    machine = get_rerun_state_machine()
    if machine.get_mode() is RerunMode.DISABLED:
        mqo.megatron.hooks.check_finite_loss(loss.item())
        return
    for rejected, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
        machine.validate_result(
            result=loss,
            rejection_func=rejected,
            message=f"{name} in the loss of this rank's micro-batch",
            tolerance=0.0,
            fatal=True,
        )


def forward_step(
    data_iterator: Iterator[Batch] | None, model: torch.nn.Module
) -> tuple[Tensor, partial]:
    """Run a micro-batch through the model; the schedule calls the returned loss function."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=packed_params(batch),
    )
    return output, partial(loss_func, batch["loss_mask"])


def datasets_provider(samples: list[int], vp_stage: int | None = None) -> tuple:
    """Build the train, validation and test datasets with `samples` sequences each."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
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
    return first and (is_first_or_last_pipeline_stage(vp_stage) or packs(get_args()))


def model_config() -> GPTModelConfig:
    """Return the model's configuration; when the model is built, its layers get their names."""
    args = get_args()
    config = gpt_config_from_args(args)
    if args.transformer_impl == ENGINE and args.spec is None and current().quantizes(ATTENTION):
        config.transformer_layer_spec = engine_layers
    config.post_wrap_hooks.append(_name_layers)
    return config


def engine_layers(config: GPTModelConfig, vp_stage: int | None = None) -> ModuleSpec:
    """Return upstream's Transformer Engine layers, with the local attention, which has sites."""
    return with_local_attention(default_layer_spec(config, vp_stage))


def bare_model(*hooks: Callable[[list[torch.nn.Module]], list[torch.nn.Module]]) -> torch.nn.Module:
    """Build the model of the arguments without wrappers, for a program that does not train.

    `hooks` change the model before its layers get their names.
    """
    config = model_config()
    config.pre_wrap_hooks += hooks
    config.finalize()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    builder = config.get_builder_cls()(config)
    (model,) = builder.build_distributed_models(groups, wrap_with_ddp=False)
    return model


def _name_layers(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    for chunk in chunks:
        label_layers(chunk)
    mqo.megatron.run.engine.prepare(chunks, get_args())
    return chunks


def restored_config(args: Namespace) -> GPTModelConfig:
    """Return `model_config()`; a model that ModelOpt quantized keeps its quantizers."""
    config = model_config()
    config.pre_wrap_hooks.append(lambda chunks: mqo.megatron.run.modelopt.restore(chunks, args))
    return config


def main(
    configure: Callable[[Namespace], GPTModelConfig] = restored_config,
    step: Callable[..., tuple] = forward_step,
    extra_args: Callable | None = None,
) -> None:
    """Train with the flags of the command line; `configure` returns the model's configuration."""
    set_startup_timestamps(program_start=preflight.PROGRAM_START, main_entry=time.time())
    with mqo.megatron.run.start.quick_sources():
        args = parse_and_validate_args(extra_args_provider=extra_args)
    gc.enable()
    check_documents(args)
    with mqo.megatron.hooks.recorded(get_tensorboard_writer()):
        mqo.megatron.hooks.check_available(args)
        mqo.megatron.hooks.before_model(args)
        mqo.megatron.hooks.label_timers(args)
        vars(datasets_provider).update(is_distributed=True)
        container = pretrain_cfg_container_from_args(args, configure(args))
        pretrain(container, datasets_provider, ModelType.encoder_or_decoder, step)


if __name__ == "__main__":
    main()
