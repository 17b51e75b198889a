"""Run as a program: cross-entropy over a vocabulary that two processes share. Leaves with 1 where
it is not upstream's, or sends something else than numbers a token.

python two_ranks.py FOLDER_OF_THE_DEMOS
"""

import sys

sys.path.insert(0, sys.argv[1])
import torch
import world  # before megatron: it makes its tree's megatron the one that is found
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import cross_entropy
from mqo.megatron.losses import chunks

VOCABULARY, SEQUENCE, BATCH = 96, 8, 2
chunks.CHUNK_ELEMENTS["cpu"] = 3 * VOCABULARY // 2


def loss_and_gradient(loss, logits, targets, weights):
    """[s, b], and the gradient of its weighted sum."""
    logits = logits.clone().requires_grad_()
    found = loss(logits * 1, targets)
    (found * weights).sum().backward()
    return {"loss": found.detach(), "gradient": logits.grad}


def check():
    weights = world.random(SEQUENCE, BATCH, seed=3)
    logits = 8 * world.random(SEQUENCE, BATCH, VOCABULARY, seed=1)
    targets = torch.randint(VOCABULARY, (SEQUENCE, BATCH), generator=torch.Generator())
    ours = tensor_parallel.vocab_parallel_cross_entropy
    given = targets, weights
    whole = world.alone(lambda: loss_and_gradient(ours, logits, *given))
    with world.groups(tensor_model_parallel_size=2):
        group = parallel_state.get_tensor_model_parallel_group()
        part = logits.chunk(2, -1)[group.rank()].contiguous()

        def of_upstream(logits, targets):
            return cross_entropy._VocabParallelCrossEntropy.apply(logits, targets, 0.0, group)

        with world.Wire() as wire:
            found = loss_and_gradient(ours, part, *given)
        # A maximum, the target's logit and a sum: each a number a token, in fp32.
        assert {name.split()[-2] for _, name in wire.sent} == {f"{4 * SEQUENCE * BATCH:,}"}
        assert sum(wire.sent.values()) == 3
        expected = loss_and_gradient(of_upstream, part, *given)
        assert all(found[name].equal(expected[name]) for name in found)
        whole["gradient"] = whole["gradient"].chunk(2, -1)[group.rank()]
        world.agree(cross_entropy=(found, whole))


world.run(check, processes=2)
