"""Fix the gradient of a down projection of multi-latent attention that is split over ranks.

Its output is gathered, and in the backward pass each rank takes its part of its own gradient. The
gradient of the latents is complete, because the backward pass of the up projection sums it. The
gradient of the rotated part of the keys, which all heads share, covers only this rank's heads, so
it is summed here.
"""

from mqo.overlay.edits import AddImport, Anchor, FileEdits, ReplaceExpression

SHARED = """
import torch

from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region


def shared_by_heads(kv_combined: torch.Tensor, latents: int) -> torch.Tensor:
    latent, rotated = kv_combined.split([latents, kv_combined.size(-1) - latents], dim=-1)
    return torch.cat([latent, copy_to_tensor_model_parallel_region(rotated)], dim=-1)
"""
GATHERED = "gather_from_tensor_model_parallel_region(kv_combined)"

FILES = (
    FileEdits(
        "megatron/core/transformer/multi_latent_attention.py",
        (
            AddImport(SHARED.lstrip()),
            ReplaceExpression(
                "MLASelfAttention.get_query_key_value_tensors",
                Anchor(GATHERED),
                f"shared_by_heads({GATHERED}, self.config.kv_lora_rank)",
            ),
        ),
    ),
)
