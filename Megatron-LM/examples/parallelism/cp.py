"""Context parallelism (CP): every sequence is split, and so are all activations.

    .venv/bin/python Megatron-LM/examples/parallelism/cp.py

Only attention is affected: all other layers work on each token separately, but a query needs the
keys and values of all tokens before it. Here every rank gathers them, and computes the rows of its
own queries. Causal rows differ in length, so a rank gets an early and a late chunk: chunks r and
2n-1-r of 2n, which cost the same for every r. Every rank has all weights, and gradients are
averaged over these ranks as in data parallelism.
"""

import torch
import world
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.utils import get_batch_on_this_cp_rank
from mqo.megatron.device import accelerator_type
from torch import Tensor

VOCABULARY, SEQUENCE, BATCH = 128, 64, 2


def gpt(ranks: int) -> GPTModel:
    """Return a GPT of one layer, with grouped queries: 4 heads share 2 of keys and values."""
    config = world.config(
        num_query_groups=2,
        normalization="RMSNorm",
        add_bias_linear=False,
        context_parallel_size=ranks,
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = GPTModel(
        config, spec, VOCABULARY, max_sequence_length=SEQUENCE, position_embedding_type="rope"
    )
    return model.to(accelerator_type())


def text() -> dict[str, Tensor]:
    """Return the whole batch, each tensor [batch, sequence]: tokens, the next tokens, positions."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    batch = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": positions}
    return {name: tensor.to(accelerator_type()) for name, tensor in batch.items()}


def loss_on(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean loss of these tokens in nats.

    No mask: causal attention makes its own, under CP one of a rank's two chunks.
    """
    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).mean()


def one_process() -> tuple[world.Tensors, ...]:
    """Return the weights, and the loss and the gradients of the whole sequences."""
    model = gpt(ranks=1)
    loss = loss_on(model, text())
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return world.weights_of(model), {"loss": loss.detach()}, gradients


def spans(positions: list[int]) -> str:
    """Format positions that form two ranges: 0-15, 48-63."""
    half = len(positions) // 2
    return ", ".join(f"{run[0]}-{run[-1]}" for run in (positions[:half], positions[half:]))


def demo() -> None:
    """Run the same step on parts of the sequences."""
    whole, expected_loss, expected = world.alone(one_process)
    with world.groups(context_parallel_size=torch.distributed.get_world_size()):
        group = parallel_state.get_context_parallel_group()
        model = gpt(group.size())
        world.load(model, whole)
        # DDP averages gradients over data- and context-parallel ranks, which are one group to it.
        model = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        mine = get_batch_on_this_cp_rank(text(), is_hybrid_cp=False, cp_group=group)
        positions = mine["position_ids"][0].tolist()
        world.say("holds", [f"tokens {spans(positions)} of {SEQUENCE}, in {BATCH} sequences"])

        with world.Wire() as wire:
            wire.phase = "forward"
            loss = loss_on(model, mine)
            wire.phase = "backward"
            loss.backward()
            wire.phase = "gradients"
            model.finish_grad_sync()
        world.say("sends", wire.lines())

        # Equal parts: the mean of the ranks' means is the mean.
        mean = loss.detach() / group.size()
        torch.distributed.all_reduce(mean, group=group)
        gradients = {name: weight.main_grad for name, weight in model.module.named_parameters()}
        world.agree(loss=({"loss": mean}, expected_loss), gradients=(gradients, expected))


if __name__ == "__main__":
    world.run(demo, processes=2)
