"""Data parallelism (DP) with the distributed optimizer: the batch and Adam's state are split.

    .venv/bin/python Megatron-LM/examples/parallelism/dp.py

Every rank has all weights and its own sequences. Backward fills one flat buffer of gradients. Plain
DP all-reduces it, and then every rank does the same optimizer step. The distributed optimizer
splits that in two: a reduce-scatter gives each rank the mean gradient of its part of the buffer,
the rank updates only this part and keeps Adam's state only for it, and an all-gather sends the
updated weights to all ranks. It sends as many bytes, but a rank stores only its part of the state.
"""

import torch
import world
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import MegatronModule
from mqo.megatron.device import accelerator_type
from torch import Tensor
from torch.nn.functional import mse_loss

HIDDEN, BATCH, STEPS, RATE, CLIP = 64, 8, 3, 1e-3, 0.05


class Mlp(MegatronModule):
    """Plain torch layers; Megatron's module class has the configuration that DDP needs."""

    def __init__(self) -> None:
        super().__init__(world.config(hidden_size=HIDDEN))
        layers = torch.nn.Linear(HIDDEN, 4 * HIDDEN), torch.nn.GELU()
        self.layers = torch.nn.Sequential(*layers, torch.nn.Linear(4 * HIDDEN, HIDDEN))
        self.to(accelerator_type())

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, hidden] from [batch, hidden]."""
        return self.layers(x)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the whole batch of a step: inputs and targets [BATCH, HIDDEN]."""
    return world.random(BATCH, HIDDEN, seed=step), world.random(BATCH, HIDDEN, seed=100 + step)


def one_process() -> tuple[world.Tensors, ...]:
    """Return weights before, losses and gradient norms of the steps, weights after: plain torch."""
    model = Mlp()
    start = world.weights_of(model)
    curve: world.Tensors = {}
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for step in range(STEPS):
        x, y = batch(step)
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        curve |= {f"loss {step}": loss.detach(), f"norm {step}": norm}
    return start, curve, world.weights_of(model)


def train_step(
    model: DistributedDataParallel, optimizer: MegatronOptimizer, step: int, wire: world.Wire
) -> world.Tensors:
    """Train one step on this rank's part of the batch; return the mean loss and the norm."""
    group = parallel_state.get_data_parallel_group()
    x, y = (tensor.chunk(group.size())[group.rank()] for tensor in batch(step))
    model.zero_grad_buffer()
    wire.phase = "forward"
    loss = mse_loss(model(x), y)
    wire.phase = "backward"
    loss.backward()
    model.finish_grad_sync()  # the reduce-scatter; a real run can overlap it with backward
    wire.phase = "step"
    _, norm, _ = optimizer.step()  # the norm's few bytes, Adam on the part, the all-gather
    wire.phase = "log"
    mean = loss.detach() / group.size()
    torch.distributed.all_reduce(mean, group=group)
    return {f"loss {step}": mean, f"norm {step}": torch.as_tensor(norm)}


def held(model: DistributedDataParallel, optimizer: MegatronOptimizer) -> list[str]:
    """Return a line for each kind of data: the share of this rank."""
    (buffer,) = model.buffers
    group = parallel_state.get_data_parallel_group()
    share = BATCH // group.size()
    first = group.rank() * share
    states = optimizer.chained_optimizers[0].optimizer.state.values()
    adam = sum(s.numel() for state in states for s in state.values() if s.dim())
    weights = sum(weight.numel() for weight in model.parameters())
    return [
        f"sequences {first}-{first + share - 1} of {BATCH}",
        f"weights     {weights:>7,} of {weights:,}",
        f"gradients   {buffer.grad_data.numel():>7,} in one flat buffer",
        f"Adam's m, v {adam:>7,} of {2 * weights:,}",
    ]


def demo() -> None:
    """Run the same steps on parts of each batch."""
    start, expected_curve, expected = world.alone(one_process)
    with world.groups():  # ranks that no other kind of parallelism takes are data-parallel
        model = Mlp()
        world.load(model, start)
        split = DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = DistributedDataParallel(model.config, split, model)
        adam = OptimizerConfig(
            lr=RATE,
            weight_decay=0.0,
            adam_beta2=0.999,
            clip_grad=CLIP,
            use_distributed_optimizer=True,
        )
        optimizer = get_megatron_optimizer(adam, [model])
        curve: world.Tensors = {}
        for step in range(STEPS):
            with world.Wire() as wire:  # that of the last step is printed
                curve |= train_step(model, optimizer, step, wire)

        world.say("holds", held(model, optimizer))
        world.say("sends in a step", wire.lines())
        weights = world.weights_of(model.module)
        world.agree(curve=(curve, expected_curve), weights=(weights, expected))


if __name__ == "__main__":
    world.run(demo, processes=2)
