"""Multi-latent attention cannot be built from local modules.

It passes head sizes of keys and values that only Transformer Engine's attention takes.
Exits with 1 if the bug is there. It needs no GPU.
"""

import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import MLATransformerConfig

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
torch.cuda.current_device = lambda: "cpu"
config = MLATransformerConfig(
    num_layers=1,
    hidden_size=32,
    num_attention_heads=2,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=8,
    use_cpu_initialization=True,
)
config.transformer_impl = "local"
try:
    TransformerBlock(config, get_gpt_layer_local_spec(multi_latent_attention=True))
    print("a layer with multi-latent attention: was built")
except TypeError as error:
    sys.exit(f"a layer with multi-latent attention: TypeError: {error}")
