"""Run as a program: a Mamba mixer that two processes share, in parts, against one process. Leaves
with 1 where output or gradients differ.

python two_ranks.py FOLDER_OF_THE_DEMOS
"""

import sys

sys.path.insert(0, sys.argv[1])
import torch
import world  # before megatron: it makes its tree's megatron the one that is found
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import build_module
from mqo.megatron.mamba.spec import mamba_layer

TOKENS, BATCH, GROUPS = 150, 2, 4
SIZES = {"mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_num_groups": GROUPS}
# The parts of each parameter that are split one by one; the others are split as a whole.
PARTS = {
    "in_proj.weight": (64, 64, 16 * GROUPS, 16 * GROUPS, 8),
    "conv1d_weight": (64, 16 * GROUPS, 16 * GROUPS),
    "conv1d_bias": (64, 16 * GROUPS, 16 * GROUPS),
}


def build(**more):
    config = world.config(**SIZES, mamba_state_dim=16, normalization="RMSNorm", **more)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return build_module(mamba_layer(config), config, layer_number=1, pg_collection=groups).mixer


def shard(name, whole, rank):
    """The part of a parameter that a rank has."""
    if name == "out_proj.weight":
        return whole.chunk(2, 1)[rank]
    parts = whole.split(PARTS.get(name, (len(whole),)))
    return torch.cat([part.chunk(2)[rank] for part in parts])


def step(mixer, hidden, weights):
    """The output, and the gradient of its weighted sum."""
    hidden = hidden.clone().requires_grad_()
    output = mixer(hidden)[0]
    (output * weights).sum().backward()
    grads = {name: parameter.grad for name, parameter in mixer.named_parameters()}
    return {"output": output.detach(), "hidden": hidden.grad, **grads}


def check():
    hidden, weights = (world.random(TOKENS, BATCH, 64, seed=seed) for seed in (1, 2))

    def reference():
        mixer = build()
        return world.weights_of(mixer), step(mixer, hidden, weights)

    whole, expected = world.alone(reference)
    for sequence in (False, True):
        with world.groups(tensor_model_parallel_size=2):
            mixer = build(tensor_model_parallel_size=2, sequence_parallel=sequence)
            rank = torch.distributed.get_rank()
            world.load(mixer, {name: shard(name, whole[name], rank) for name in whole})
            tokens = [x.chunk(2)[rank] if sequence else x for x in (hidden, weights)]
            ours = step(mixer, *tokens)
        right = {name: shard(name, expected[name], rank) for name in whole}
        for name in ("output", "hidden"):
            right[name] = expected[name].chunk(2)[rank] if sequence else expected[name]
        world.agree(mixer=(ours, right))


world.run(check, processes=2)
