"""Parse arguments, build a GPT, share a batch and train, with the Megatron of this tree.

Releases from 0.19 on build a model from a configuration; 0.17 and 0.18 call a model provider. In
0.17 the trainer also parses the command line.
"""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron import core
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import import_module
from megatron.core.utils import get_batch_on_this_cp_rank
from megatron.training import arguments, get_args, initialize, pretrain, training, utils
from mqo.megatron.attention.spec import with_local_attention
from mqo.megatron.transformer_engine.releases import NAME as ENGINE
from mqo.quant.config import current
from mqo.quant.formats import ATTENTION

BUILDS_FROM_CONFIGURATION = (Path(training.__file__).parent / "models/gpt.py").is_file()
HAS_HYBRID_MODEL = (Path(core.__file__).parent / "models/hybrid").is_dir()
PARSES_BEFORE_TRAINING = hasattr(arguments, "parse_and_validate_args")

# In 0.17, utils is a module; later it is a package.
_common = getattr(utils, "common_utils", utils)
get_blend_and_blend_per_split = _common.get_blend_and_blend_per_split
is_first_or_last_pipeline_stage = _common.is_first_or_last_pipeline_stage

# `model_provider`, or a function with its parameters.
Provider = Callable[..., torch.nn.Module]


def parse(extra_args: Callable | None) -> Namespace:
    """Parse and check the command line; make the arguments, and what they select, global."""
    if PARSES_BEFORE_TRAINING:
        return arguments.parse_and_validate_args(extra_args_provider=extra_args)
    initialize.initialize_megatron(extra_args_provider=extra_args)
    training.initialize_megatron = lambda **given: None  # its caller, the trainer, repeats it
    return get_args()


def train(args: Namespace, datasets: Callable, provider: Provider, step: Callable) -> None:
    """Train with upstream's trainer; `provider` builds each chunk of this rank's model."""
    kind = ModelType.encoder_or_decoder
    # With megatron.post_training, which checkouts have, the trainer would load a teacher once more.
    training.has_nvidia_modelopt = False
    if not PARSES_BEFORE_TRAINING:
        pretrain(datasets, provider, kind, step)
    elif BUILDS_FROM_CONFIGURATION:
        pretrain(container(args, provider), datasets, kind, step)
    else:
        pretrain(container(args, provider), datasets, provider, kind, step)


def container(args: Namespace, provider: Provider) -> Any:
    """Return upstream's configuration of a training; from 0.19 on it builds the model."""
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    if not BUILDS_FROM_CONFIGURATION:
        return pretrain_cfg_container_from_args(args)
    from .configured import provided_config

    return pretrain_cfg_container_from_args(args, provided_config(args, provider))


def bare_model(args: Namespace, provider: Provider) -> torch.nn.Module:
    """Build the model of this rank without the wrapper for data parallelism."""
    if not BUILDS_FROM_CONFIGURATION:
        (model,) = training.get_model(provider, wrap_with_ddp=False)
        return model
    from .configured import provided_config

    config = provided_config(args, provider)
    config.finalize()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    builder = config.get_builder_cls()(config)
    (model,) = builder.build_distributed_models(groups, wrap_with_ddp=False)
    return model


def build(
    args: Namespace, config: TransformerConfig | None = None, **parts: Any
) -> torch.nn.Module:
    """Return upstream's model of `args`: a HybridModel if they have its pattern, else a GPT.

    `parts` are the other parameters of `build_gpt`.
    """
    if not getattr(args, "hybrid_layer_pattern", None):
        return build_gpt(args, config=config, **parts)
    if not HAS_HYBRID_MODEL:
        raise ValueError("--hybrid-layer-pattern: this program needs Megatron 0.18 for it")
    from .hybrid import build_hybrid

    return build_hybrid(args, config, **{"vp_stage": None} | parts)


def build_gpt(
    args: Namespace,
    *,
    pre_process: bool | None,
    post_process: bool | None,
    parallel_output: bool,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
) -> GPTModel:
    """Return upstream's GPT of `args`, without what this project changes in a model.

    pre_process and post_process say whether the embedding and the output layer are part of it;
    with parallel_output each tensor rank keeps its part of the logits. `config` is that of `args`,
    if it was built before.
    """
    parts = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
    groups = ProcessGroupCollection.use_mpu_process_groups()
    local_attention = args.transformer_impl == ENGINE and not args.spec
    local_attention = local_attention and current().quantizes(ATTENTION)
    if BUILDS_FROM_CONFIGURATION:
        from .configured import gpt_config

        whole = gpt_config(args, config, local_attention=local_attention)
        whole.parallel_output = parallel_output
        return whole.get_builder_cls()(whole).build_model(groups, **parts)
    config = config or arguments.core_transformer_config_from_args(args)
    spec = _layer_spec(args, config, vp_stage)
    return GPTModel(
        config,
        with_local_attention(spec) if local_attention else spec,
        args.padded_vocab_size or vocab_size_with_padding(args.vocab_size, args, False),
        args.max_position_embeddings,
        parallel_output=parallel_output,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        pg_collection=groups,
        **parts,
    )


def _layer_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None) -> Any:
    """Return the specification of the layers in releases before 0.19."""
    for name in ("mtp_num_layers", "experimental_attention_variant"):
        if getattr(args, name, None):
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag}: this program needs Megatron 0.19 for it; leave it out")
    if args.spec:
        return import_module(args.spec)
    use_engine = args.transformer_impl == ENGINE
    if args.num_experts:
        return get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=use_engine,
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
            vp_stage=vp_stage,
        )
    if args.heterogeneous_layers_config_path:
        from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
            get_gpt_heterogeneous_layer_spec,
        )

        return get_gpt_heterogeneous_layer_spec(config, use_engine)
    norms = {
        "qk_layernorm": args.qk_layernorm,
        "multi_latent_attention": args.multi_latent_attention,
        "qk_l2_norm": args.qk_l2_norm,
    }
    if use_engine:
        return get_gpt_layer_with_transformer_engine_spec(**norms)
    return get_gpt_layer_local_spec(**norms, normalization=args.normalization)


def share_batch(batch: dict[str, Any], args: Namespace, *, packed: bool) -> dict[str, Any]:
    """Send the batch of tensor-parallel rank 0 to its group; return this rank's part of it.

    Other ranks pass None for each tensor. With context parallelism a rank keeps two chunks of the
    sequence.
    """
    group = mpu.get_context_parallel_group()
    if not PARSES_BEFORE_TRAINING:
        read = {name: value for name, value in batch.items() if value is not None}
        batch = utils.get_batch_on_this_tp_rank(iter([read]) if read else None)
        ends = ("cu_seqlens", "max_seqlen", "local_cp_size")
        batch = {name: value for name, value in batch.items() if name not in ends}
        return get_batch_on_this_cp_rank(batch, cp_group=group)
    from megatron.core.utils import get_batch_on_this_tp_rank

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
    kind = {"is_hybrid_cp": False, "mtp_on_this_rank": False}
    kind |= {"has_cu_seqlens" if BUILDS_FROM_CONFIGURATION else "is_sft": packed}
    mask = args.create_attention_mask_in_dataloader
    batch = get_batch_on_this_tp_rank(
        batch, create_attention_mask_in_dataloader=mask, **sizes, **rank, **kind
    )
    if packed:
        from megatron.core.utils import flatten_batch_for_packed_sequences  # from 0.19 on

        return flatten_batch_for_packed_sequences(batch)
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
