"""With tensor parallelism, multi-latent attention has a wrong gradient of the keys' rotated part.

All heads share this part, and the gradient lacks the heads of other processes.
Runs the same attention on one process and on two, with the same weights and input. The attention
core is implemented here: Transformer Engine's needs a GPU, and the local one does not support these
sizes. Exits with 1 if the gradients of the down projection differ. It needs no GPU.
"""

import sys
import tempfile

import torch

torch.compile = lambda function: function  # no compiler is needed

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention as mla
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import MLATransformerConfig

LATENTS, ROTATED = 8, 4


class Core(torch.nn.Module):
    """Attention without a mask; tensors are [sequence, batch, heads, size]."""

    def __init__(self, *args, softmax_scale, **kwargs):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, *args, **kwargs):
        """Return [sequence, batch, heads * size]."""
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) * self.scale
        return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), value).flatten(2)


def gradient(rank, ranks, folder):
    """Save the gradient of the down projection of keys and values."""
    store = f"file://{folder}/{ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    torch.cuda.current_device = lambda: "cpu"
    torch.manual_seed(1)
    config = MLATransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=2,
        q_lora_rank=None,
        kv_lora_rank=LATENTS,
        qk_head_dim=8,
        qk_pos_emb_head_dim=ROTATED,
        v_head_dim=8,
        rope_type="rope",
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
    )
    config.transformer_impl = "local"
    modules = mla.MLASelfAttentionSubmodules(
        linear_q_proj=ColumnParallelLinear,
        linear_kv_down_proj=ColumnParallelLinear,
        linear_kv_up_proj=ColumnParallelLinear,
        core_attention=Core,
        linear_proj=RowParallelLinear,
        q_layernorm=IdentityOp,
        kv_layernorm=IdentityOp,
    )
    attention = mla.MLASelfAttention(config, modules, 1, AttnMaskType.causal)
    given, weights = torch.randn(2, 6, 1, 32)
    (attention(given, None)[0] * weights).sum().backward()
    mine = attention.linear_kv_down_proj.weight.grad
    parts = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(parts, mine)
    if rank == 0:
        torch.save(torch.cat(parts), f"{folder}/{ranks}.pt")


with tempfile.TemporaryDirectory() as folder:
    for ranks in (1, 2):
        torch.multiprocessing.start_processes(gradient, (ranks, folder), ranks, start_method="fork")
    single, double = (torch.load(f"{folder}/{ranks}.pt") for ranks in (1, 2))
wrong = False
for part, rows in (("latents", slice(LATENTS)), ("rotated part", slice(LATENTS, None))):
    off = ((double[rows] - single[rows]).norm() / single[rows].norm()).item()
    print(f"gradient of the {part}: two processes are off by {off:.1e} of its norm")
    wrong |= off > 1e-4
sys.exit(wrong)
