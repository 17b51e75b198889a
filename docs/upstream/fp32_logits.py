"""The loss over the vocabulary overwrites its input logits if they are fp32.

The conversion to fp32 then returns the same tensor, and the next steps work in place.
Exits with 1 if the bug is there. It needs no GPU.
"""

import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
targets = torch.arange(4).view(4, 1)
wrong = False
for dtype in (torch.bfloat16, torch.float32):
    torch.manual_seed(1)
    logits = torch.randn(4, 1, 8, requires_grad=True).to(dtype)
    z_loss = logits.logsumexp(-1).square().mean()
    first, second = (vocab_parallel_cross_entropy(logits, targets).mean() for _ in range(2))
    try:
        (first + z_loss).backward()
        ended = "ran"
    except RuntimeError as error:
        ended = str(error).split(":")[0]
    print(f"{dtype}: loss {first:.4f}, of the same logits again {second:.4f}; backward: {ended}")
    wrong |= second.item() != first.item() or ended != "ran"
sys.exit(wrong)
