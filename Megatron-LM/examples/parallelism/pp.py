"""Pipeline parallelism (PP): the layers are split into stages, and a batch into micro-batches.

    .venv/bin/python Megatron-LM/examples/parallelism/pp.py

A stage sends its output to the next stage, and the gradient of its input to the one before. While
one micro-batch is in transit, a stage works on others. Megatron's schedule is 1F1B: a stage runs
just enough forward passes to keep the later stages busy, then alternates one forward and one
backward pass, so that it holds the activations of only a few micro-batches.
"""

from collections.abc import Iterator
from functools import partial

import torch
import world
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from mqo.megatron.device import accelerator_type
from torch import Tensor
from torch.nn.functional import mse_loss

LAYERS, MICRO_BATCHES, TOKENS, BATCH, HIDDEN = 8, 6, 16, 2, 64
Batch = tuple[int, Tensor, Tensor]


class Stage(MegatronModule):
    """Some consecutive layers; all of them if there is one stage."""

    model_type = ModelType.encoder_or_decoder  # the schedule reads it

    def __init__(self) -> None:
        super().__init__(world.config(hidden_size=HIDDEN, pipeline_dtype=torch.float32))
        stage = parallel_state.get_pipeline_model_parallel_rank()
        share = LAYERS // parallel_state.get_pipeline_model_parallel_world_size()
        # Named by their index in the whole model, so that weights are found by name.
        mine = range(stage * share, (stage + 1) * share)
        self.layers = torch.nn.ModuleDict({str(i): torch.nn.Linear(HIDDEN, HIDDEN) for i in mine})
        self.received: Tensor | None = None
        self.to(accelerator_type())

    def set_input_tensor(self, received: list[Tensor | None]) -> None:
        """Store what the schedule received from the stage before: None on the first."""
        (self.received,) = received

    def forward(self, x: Tensor) -> Tensor:
        """Return [tokens, batch, hidden]; the first stage takes x, others what they received."""
        x = x if self.received is None else self.received
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return x


def batches() -> Iterator[Batch]:
    """Yield the micro-batches of a step: number, input and target [tokens, batch, hidden]."""
    for i in range(MICRO_BATCHES):
        x, y = (world.random(TOKENS, BATCH, HIDDEN, seed=s + i) for s in (10, 20))
        yield i, x, y


def forward(order: list[str], data: Iterator[Batch], stage: Stage) -> tuple:
    """Return a micro-batch's output and its loss function, for the schedule.

    The schedule calls the loss function only on the last stage. `order` records the passes.
    """
    number, x, y = next(data)
    order.append(f"F{number}")
    hidden = stage(x)
    hidden.register_hook(lambda grad: order.append(f"B{number}"))

    def loss(output: Tensor) -> tuple[Tensor, Tensor]:
        mean = mse_loss(output, y)
        return mean, mean.detach().clone()

    return hidden, loss


def step(stage: Stage, order: list[str]) -> tuple[world.Tensors, world.Tensors]:
    """Return the micro-batches' losses (on the last stage), and the stage's mean gradients."""
    losses = get_forward_backward_func()(
        forward_step_func=partial(forward, order),
        data_iterator=batches(),
        model=stage,
        num_microbatches=MICRO_BATCHES,
        seq_length=TOKENS,
        micro_batch_size=BATCH,
    )
    gradients = {name: weight.grad for name, weight in stage.named_parameters()}
    return {f"loss {i}": loss for i, loss in enumerate(losses)}, gradients


def one_process() -> tuple[world.Tensors, ...]:
    """Run the same step on one stage with all layers: the schedule is then a plain loop."""
    whole = Stage()
    return world.weights_of(whole), *step(whole, [])


def in_flight(order: list[str]) -> int:
    """Return the largest number of micro-batches that ran forward and not yet backward."""
    ahead = [sum(1 if part[0] == "F" else -1 for part in order[: i + 1]) for i in range(len(order))]
    return max(ahead)


def demo() -> None:
    """Run the same step on stages."""
    whole, expected_losses, expected = world.alone(one_process)
    with world.groups(pipeline_model_parallel_size=torch.distributed.get_world_size()):
        stage = Stage()
        order: list[str] = []
        world.load(stage, whole)
        world.say("holds", [f"layers {', '.join(stage.layers)} of {LAYERS}"])
        with world.Wire() as wire:
            losses, gradients = step(stage, order)
        world.say("runs", [" ".join(order)])
        world.say("activations in flight", [f"{in_flight(order)} micro-batches"])
        world.say("sends", wire.lines())
        losses = world.gathered(losses)[-1]  # only the last stage has them
        world.agree(
            losses=(losses, expected_losses),
            gradients=(gradients, {name: expected[name] for name in gradients}),
        )


if __name__ == "__main__":
    world.run(demo, processes=4)
