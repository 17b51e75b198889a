"""Run as a program: models that quantize_model changed, in DDP and FSDP2 on two ranks.

python data_parallel_models.py FOLDER_OF_THE_DEMOS FOLDER_TO_WRITE_TO

Each rank has one micro-batch of a step; the reference has both, one after the other. Stochastic
rounding then draws the same numbers, so that only the order of sums differs.
"""

import sys

sys.path.insert(0, sys.argv[1])
import torch
import world
from mqo.quant.model import quantize_model
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDE, BLOCKS, TOKENS, STEPS, RANKS = 64, 3, 32, 3, 2


def build():
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU()) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks)
    return model, quantize_model(model, "mxfp4-backward")


def batch(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(TOKENS, WIDE, generator=generator)


def train(model, ranks, named):
    """The weights after some steps in which this process has the micro-batches of `ranks`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for rank in ranks:
            (model(batch(step, rank)).square().mean() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(weight) for name, weight in named.named_parameters()}


def whole(weight):
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().clone()


def reference():
    """The same on one process, which does not know of the other."""
    model, shared = build()
    shared.micro_batches.set_replica(0, 1)
    return train(model, range(RANKS), model)


def replicated():
    model, _ = build()
    return train(DistributedDataParallel(model), [distributed.get_rank()], model)


def sharded():
    model, _ = build()
    for block in model:
        fully_shard(block)
    return train(fully_shard(model), [distributed.get_rank()], model)


def check():
    expected = reference()
    for program in (replicated, sharded):
        weights = program()
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            # Another draw of an operand moves a weight by 1e-4 and more.
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)
    print("EQUAL")


world.run(check, processes=RANKS)
