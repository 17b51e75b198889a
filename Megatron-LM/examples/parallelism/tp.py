"""Tensor parallelism (TP): the weights of a layer are cut, every rank computes a part of it.

    .venv/bin/python Megatron-LM/examples/parallelism/tp.py

An MLP is  y = gelu(x A) B.  Split A by columns and B by the same rows: then gelu(x A_r) B_r needs
no data of other ranks, and the parts sum to y. That is one all-reduce forward, and one backward
for the gradient of x, to which the columns of every rank contribute.
"""

from typing import Any

import torch
import world
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from mqo.megatron.device import accelerator_type
from torch import Tensor
from torch.nn.functional import gelu, mse_loss

TOKENS, HIDDEN, FFN = 32, 64, 320


class Mlp(torch.nn.Module):
    """An MLP; with several ranks, each builds its part."""

    def __init__(self) -> None:
        super().__init__()
        config = world.config(hidden_size=HIDDEN, ffn_hidden_size=FFN)
        both = {"config": config, "init_method": config.init_method, "skip_bias_add": False}
        # gather_output=False, input_is_parallel=True: nothing is sent between the two layers.
        self.up = ColumnParallelLinear(HIDDEN, FFN, bias=True, gather_output=False, **both)
        self.down = RowParallelLinear(FFN, HIDDEN, bias=True, input_is_parallel=True, **both)
        self.to(accelerator_type())

    def forward(self, x: Tensor) -> Tensor:
        """Return [tokens, hidden] from [tokens, hidden]; Megatron's layers return a bias, too."""
        part, _ = self.up(x)
        y, _ = self.down(gelu(part))
        return y


def step(model: Mlp, wire: world.Wire) -> tuple[world.Tensors, world.Tensors]:
    """Return the loss, and every gradient, that of the input as well."""
    x = world.random(TOKENS, 1, HIDDEN, seed=2).requires_grad_()
    wire.phase = "forward"
    loss = mse_loss(model(x), world.random(TOKENS, 1, HIDDEN, seed=3))
    wire.phase = "backward"
    loss.backward()
    gradients: dict[str, Any] = {"input": x.grad}
    gradients |= {name: weight.grad for name, weight in model.named_parameters()}
    return {"loss": loss.detach()}, gradients


def cut(name: str, whole: Tensor) -> Tensor:
    """Return this rank's part of a weight or of its gradient.

    torch keeps weights as [out, in]: a column of A is a row of `up.weight`.
    """
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
    if dim is None:  # the bias of `down` is added after the sum, and whole on every rank
        return whole
    return whole.chunk(ranks, dim)[parallel_state.get_tensor_model_parallel_rank()]


def held(model: Mlp, whole: world.Tensors) -> list[str]:
    """Return the lines that say which channels this rank holds, and the shape of each part."""
    share = FFN // parallel_state.get_tensor_model_parallel_world_size()
    first = parallel_state.get_tensor_model_parallel_rank() * share
    return [f"channels {first}-{first + share - 1} of {FFN}"] + [
        f"{name:12} {list(part.shape)!s:10} of {list(whole[name].shape)}"
        for name, part in model.named_parameters()
    ]


def one_process() -> tuple[world.Tensors, ...]:
    """Return the whole weights, and the loss and gradients of a step."""
    model = Mlp()
    return world.weights_of(model), *step(model, world.Wire())


def demo() -> None:
    """Run the same step on parts."""
    whole, expected_loss, expected = world.alone(one_process)
    with world.groups(tensor_model_parallel_size=torch.distributed.get_world_size()):
        model = Mlp()
        world.load(model, {name: cut(name, weight) for name, weight in whole.items()})
        world.say("holds", held(model, whole))

        with world.Wire() as wire:
            loss, gradients = step(model, wire)
        world.say("sends", wire.lines())

        parts = {name: cut(name, gradient) for name, gradient in expected.items()}
        world.agree(loss=(loss, expected_loss), gradients=(gradients, parts))


if __name__ == "__main__":
    world.run(demo, processes=2)
