"""Build upstream's HybridModel from the layers of its GPT, without Transformer Engine.

Each layer of a pattern is a part of a GPT's local layer: its attention, or its MLP or experts. The
modules are the same, so a model computes the same values in either class.
"""

from argparse import Namespace
from dataclasses import fields

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel.utils import is_pp_first_stage, is_pp_last_stage
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from megatron.training.arguments import core_transformer_config_from_args
from mqo.megatron.mamba.spec import mamba_layer
from mqo.megatron.rotary import FACTOR

_ATTENTION = ("input_layernorm", "self_attention", "self_attn_bda")
_MLP = ("pre_mlp_layernorm", "mlp", "mlp_bda")


def build_hybrid(
    args: Namespace,
    config: TransformerConfig | None,
    *,
    pre_process: bool | None,
    post_process: bool | None,
    parallel_output: bool,
    vp_stage: int | None,
) -> HybridModel:
    """Return this rank's part of the HybridModel of `args`; parameters are as in `build_gpt`."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = config or core_transformer_config_from_args(args)
    setattr(config, FACTOR, args.rope_scaling_factor if args.use_rope_scaling else None)
    return HybridModel(
        config=config,
        hybrid_stack_spec=local_stack(args, config),
        vocab_size=args.padded_vocab_size or vocab_size_with_padding(args.vocab_size, args, False),
        max_sequence_length=args.max_position_embeddings,
        hybrid_layer_pattern=args.hybrid_layer_pattern,
        pre_process=is_pp_first_stage(groups.pp) if pre_process is None else pre_process,
        post_process=is_pp_last_stage(groups.pp) if post_process is None else post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=parallel_output,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        pg_collection=groups,
        vp_stage=vp_stage,
    )


def local_stack(args: Namespace, config: TransformerConfig) -> ModuleSpec:
    """Return the specification of a stack of local layers."""
    norms = {
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
        "normalization": args.normalization,
        "qk_l2_norm": args.qk_l2_norm,
    }
    dense = get_gpt_layer_local_submodules(**norms)
    attention = ModuleSpec(TransformerLayer, submodules=_part(dense, _ATTENTION))
    kind = "mla_layer" if config.multi_latent_attention else "attention_layer"
    if kind not in {field.name for field in fields(HybridStackSubmodules)}:
        raise ValueError("MLA in a HybridModel: this program needs Megatron 0.19 for it")
    layers = {
        kind: attention,
        "mlp_layer": ModuleSpec(MLPLayer, submodules=_part(dense, _MLP)),
        "mamba_layer": mamba_layer(config),
    }
    if args.num_experts:
        sparse = get_gpt_layer_local_submodules(
            num_experts=args.num_experts, moe_grouped_gemm=args.moe_grouped_gemm, **norms
        )
        layers["moe_layer"] = ModuleSpec(MoETransformerLayer, submodules=_part(sparse, _MLP))
    return ModuleSpec(HybridStack, submodules=HybridStackSubmodules(**layers))


def _part(layer: TransformerLayerSubmodules, names: tuple[str, ...]) -> TransformerLayerSubmodules:
    """Return some of the submodules of a layer; the others keep their default, which is nothing."""
    keys = layer.sharded_state_dict_keys_map
    kept = {
        field.name: getattr(layer, field.name) for field in fields(layer) if field.name in names
    }
    own = {key: keys[key] for key in keys if key.removesuffix(".") in names}
    return TransformerLayerSubmodules(**kept, sharded_state_dict_keys_map=own)
