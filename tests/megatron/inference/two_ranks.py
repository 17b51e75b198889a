"""Run as a program: the losses in two processes against one. Leaves with 1 where they differ.

python two_ranks.py FOLDER_OF_THE_DEMOS
"""

import sys

sys.path.insert(0, sys.argv[1])
import world  # first: it makes its tree's megatron the one that is found
from megatron.core import parallel_state
from megatron.inference.algos import distillation

WIDTH, VOCABULARY, SEQUENCE, BATCH = 64, 96, 8, 2


def loss_and_gradient(loss, student, teacher, weights):
    """[b, s], and the gradient of its weighted sum for the student's output."""
    student = student.clone().requires_grad_()
    found = loss(student, teacher)
    (found * weights).sum().backward()
    return {"loss": found.detach(), "gradient": student.grad}


def check():
    weights = world.random(BATCH, SEQUENCE, seed=3).abs()
    logits = [8 * world.random(SEQUENCE, BATCH, VOCABULARY, seed=s) for s in (1, 2)]
    hidden = [world.random(SEQUENCE, BATCH, WIDTH, seed=s) for s in (4, 5)]
    one = world.config()
    whole = world.alone(
        lambda: (
            loss_and_gradient(distillation.LogitsKLLoss(one, 2.0), *logits, weights),
            loss_and_gradient(distillation.HiddenStateCosineLoss(one), *hidden, weights),
        )
    )
    with world.groups(tensor_model_parallel_size=2):
        rank = parallel_state.get_tensor_model_parallel_rank()
        two = world.config(tensor_model_parallel_size=2, sequence_parallel=True)
        columns = [part.chunk(2, -1)[rank].contiguous() for part in logits]
        with world.Wire() as wire:
            kl = loss_and_gradient(distillation.LogitsKLLoss(two, 2.0), *columns, weights)
        # The maxima of both models, their sums, and the loss: numbers a token, in fp32.
        number = 4 * SEQUENCE * BATCH
        sent = {name.split()[-2]: count for (_, name), count in wire.sent.items()}
        assert sent == {f"{2 * number:,}": 2, f"{number:,}": 1}
        rows = [part.chunk(2, 0)[rank].contiguous() for part in hidden]
        cosine = loss_and_gradient(distillation.HiddenStateCosineLoss(two), *rows, weights)
        expected = [dict(of) for of in whole]
        expected[0]["gradient"] = expected[0]["gradient"].chunk(2, -1)[rank]
        expected[1]["gradient"] = expected[1]["gradient"].chunk(2, 0)[rank]
        world.agree(kl=(kl, expected[0]), cosine=(cosine, expected[1]))


world.run(check, processes=2)
