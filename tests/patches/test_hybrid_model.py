"""HybridModels of local layers against GPTs: the patched source in one process, beside stubs."""

import pytest

from .test_local_norms import program

# Without CUDA, Transformer Engine is hidden: so its norm is replaced by one that cannot be built.
BUILD = """
import json
import torch
from types import SimpleNamespace
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.inference.gpt.hybrid import build_hybrid

torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)


class OfTransformerEngine:
    def __init__(self, **sizes):
        raise RuntimeError("not for local layers")


hybrid_block.TENorm = OfTransformerEngine
SIZES = dict(hidden_size=64, num_attention_heads=4, ffn_hidden_size=128, add_bias_linear=False)
SIZES |= dict(use_cpu_initialization=True, normalization="RMSNorm", gated_linear_unit=True)
SIZES |= dict(hidden_dropout=0.0, attention_dropout=0.0, transformer_impl="local")
EXPERTS = dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=32, moe_layer_freq=[0, 1])
LATENT = dict(multi_latent_attention=True, kv_lora_rank=32, q_lora_rank=None, qk_head_dim=16)
LATENT |= dict(qk_pos_emb_head_dim=16, v_head_dim=16, rope_type="rope", qk_layernorm=True)
CASES = {
    "dense": ("*-*-", TransformerConfig, {}),
    "experts": ("*-*E", TransformerConfig, EXPERTS),
    "MLA": ("+-+E", MLATransformerConfig, EXPERTS | LATENT),
}
TOKENS = torch.arange(2 * 16).view(2, 16) % 32
PLACES = torch.arange(16).expand(2, 16)


def loss_and_gradients(model):
    loss = model(TOKENS, PLACES, None, labels=TOKENS.roll(-1)).sum()
    loss.backward()
    return loss.item(), [p.grad.double().sum().item() for p in model.parameters()]


def model_of(kind, hybrid):
    pattern, config_class, more = CASES[kind]
    layers = len(pattern) if hybrid else len(pattern) // 2
    config = config_class(num_layers=layers, is_hybrid_model=hybrid, **SIZES | more)
    parts = dict(pre_process=True, post_process=True)
    torch.manual_seed(1)
    if not hybrid:
        spec = get_gpt_decoder_block_spec(config, False, normalization="RMSNorm")
        rope = dict(position_embedding_type="rope", rope_scaling=True, rope_scaling_factor=32.0)
        return GPTModel(config, spec, 32, 16, **rope, **parts)
    args = SimpleNamespace(
        hybrid_layer_pattern=pattern, use_rope_scaling=True, rope_scaling_factor=32.0,
        padded_vocab_size=32, max_position_embeddings=16, fp16_lm_cross_entropy=False,
        untie_embeddings_and_output_weights=True, position_embedding_type="rope",
        rotary_percent=1.0, rotary_base=10000, rotary_seq_len_interpolation_factor=None,
        normalization="RMSNorm", qk_l2_norm=False, num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
    )
    return build_hybrid(args, config, parallel_output=True, vp_stage=None, **parts)


found = {}
for kind in CASES:
    found[kind] = [loss_and_gradients(model_of(kind, hybrid)) for hybrid in (False, True)]
found["norm"] = type(model_of("dense", True).decoder.final_norm).__name__
print(json.dumps(found))
"""


@pytest.fixture(scope="module", params=["alone", "beside apex"])
def built(request, vendored):
    return program(vendored, BUILD, *(["with_apex"] if request.param == "beside apex" else []))


@pytest.mark.parametrize("kind", ["dense", "experts", "MLA"])
def test_a_hybrid_model_computes_what_the_gpt_does(built, kind):
    gpt, hybrid = built[kind]
    assert hybrid == gpt


def test_the_last_norm_is_that_of_the_layers(built):
    assert built["norm"] == "RMSNorm"
