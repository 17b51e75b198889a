"""Expert parallelism (EP): each rank holds some experts of a mixture, and tokens are sent to them.

    .venv/bin/python Megatron-LM/examples/parallelism/ep.py

The model is in moe_model.py. A rank routes its own tokens. One all-to-all sends each token to the
ranks that hold its experts, a second one returns the outputs, and the backward pass sends the
gradients along the same paths. The router decides how much is sent where, so the ranks exchange the
counts first. The rest of the model is data-parallel.
"""

import torch
import world
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from moe_model import EXPERTS, SEQUENCES, MoeModel, of_this_rank, one_process, sequences


def demo() -> None:
    """Run one process's step, with each expert on one rank."""
    whole, expected_loss, expected = world.alone(one_process)
    ranks = torch.distributed.get_world_size()
    with world.groups(expert_model_parallel_size=ranks):
        model = MoeModel()
        world.load(model, of_this_rank(model, whole))
        model = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        rank = parallel_state.get_data_parallel_rank()
        mine = sequences().chunk(ranks, dim=1)[rank]

        with world.Wire() as wire:
            wire.phase = "forward"
            loss = model(mine)
            wire.phase = "backward"
            loss.backward()
            wire.phase = "gradients"
            model.finish_grad_sync()

        mixture, routed = model.module.mixture, model.module.routed
        experts = sum(weight.numel() for weight in mixture.experts.parameters())
        rest = sum(weight.numel() for weight in model.parameters()) - experts
        world.say(
            "holds",
            [
                f"experts {mixture.local_expert_indices} of {EXPERTS}: {experts:,} weights",
                f"the rest of the model: {rest:,} weights",
                f"{mine.size(1)} of {SEQUENCES} sequences",
            ],
        )
        world.say("routes its tokens", [f"{n:3} to expert {e}" for e, n in enumerate(routed)])
        world.say("sends", wire.lines())

        mean = loss.detach() / ranks
        torch.distributed.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        gradients = {name: weight.main_grad for name, weight in model.module.named_parameters()}
        parts = of_this_rank(model.module, expected)
        world.agree(loss=({"loss": mean}, expected_loss), gradients=(gradients, parts))


if __name__ == "__main__":
    world.run(demo, processes=2)
