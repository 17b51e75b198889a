"""Run as a program: weights that are gathered behind the optimizer's step, cached and not.

python gathered_weights.py FOLDER_OF_THE_DEMOS FOLDER_TO_WRITE_TO

Two data-parallel ranks with upstream's distributed optimizer and overlapped gathering: after the
step a rank has new values for its own part of the weights alone, and the others come in during the
next forward pass. Leaves with 1 where the cache changes a weight.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import torch
import world  # before megatron: it makes its tree's megatron the one that is found
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, optimizer
from megatron.core.transformer.module import MegatronModule
from mqo.quant import config, gemms, weights
from mqo.quant.gemms import gemm_operands
from torch import nn

HIDDEN, STEPS, PASSES = 64, 4, 2


class Linear(nn.Module):
    """A linear layer as the patched Megatron's: its weight is quantized for fprop."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(HIDDEN, HIDDEN).normal_(std=0.2))

    def forward(self, x):
        q = gemm_operands("fprop", "mxfp4", self.weight)
        return torch.tanh(q.lhs(x) @ q.rhs(self.weight).t())


class Net(MegatronModule):
    def __init__(self):
        super().__init__(world.config(hidden_size=HIDDEN, bf16=True, params_dtype=torch.bfloat16))
        self.layers = nn.Sequential(*(Linear() for _ in range(4)))
        self.bfloat16()

    def forward(self, x):
        return self.layers(x)


def differ(model):
    """Whether this rank's weights are other ones than the other's: they are being gathered."""
    here = torch.cat([w.detach().float().flatten() for w in model.parameters()])
    return len({tuple(each) for each in world.gathered(here.tolist())}) > 1


def train(cache, folder):
    """The weights after some steps, and how often weights were quantized."""
    path = folder / f"{cache}.toml"
    path.write_text(f"[quantizer]\ncache_weights = {cache}\n")
    os.environ[config.ENVIRONMENT_VARIABLE] = str(path)
    config.reset()
    weights.clear()
    torch.manual_seed(1)
    overlapped = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        bucket_size=HIDDEN * HIDDEN,
    )
    net = Net()
    model = DistributedDataParallel(net.config, overlapped, net)
    chosen = OptimizerConfig(
        lr=1e-2, bf16=True, use_distributed_optimizer=True, overlap_param_gather=True
    )
    adam = get_megatron_optimizer(chosen, [model])
    done = [0]
    quantize = gemms.fake_quantize

    def counting(x, *args, **kwargs):
        done[0] += isinstance(x, nn.Parameter)
        return quantize(x, *args, **kwargs)

    gemms.fake_quantize = counting
    for step in range(STEPS):
        model.zero_grad_buffer()
        for number in range(PASSES):
            seed = 10 * step + 2 * number + torch.distributed.get_rank()
            x = world.random(8, HIDDEN, seed=seed).bfloat16()
            (model(x) - x.roll(1, -1)).float().square().mean().backward()
        model.finish_grad_sync()
        adam.step()
        assert differ(net), "the step has gathered already: nothing is tested"
    model.start_param_sync(force_sync=True)
    gemms.fake_quantize = quantize
    return world.weights_of(net), done[0]


def check():
    folder = Path(sys.argv[2])
    with world.groups():
        plain, every = train("false", folder)
        cached, once = train("true", folder)
        assert (every, once) == (4 * STEPS * PASSES, 4 * STEPS)
        assert all(cached[name].equal(weight) for name, weight in plain.items())
        # Without an epoch for each step the copies would go stale: this test would fail.
        optimizer.weights_changed = weights.weights_changed = lambda: None
        stale, _ = train("true", folder)
        assert not all(stale[name].equal(weight) for name, weight in plain.items())
    print("EQUAL")


world.run(check, processes=2)
