"""Expert data parallelism (EDP): ranks beyond those of expert parallelism hold copies of experts.

    .venv/bin/python Megatron-LM/examples/parallelism/edp.py

4 ranks, EP 2: ranks 0 and 1 together hold all experts, and ranks 2 and 3 hold them again. Tokens
travel within such a pair. The copies of an expert (on ranks 0 and 2, or 1 and 3) are data-parallel:
their gradients are summed over that group, all other gradients over all 4 ranks. Both sums are
divided by 4, since an expert sees the tokens of both ranks of its pair.
"""

import torch
import world
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from moe_model import EXPERTS, SEQUENCES, MoeModel, of_this_rank, one_process, sequences
from torch import Tensor, distributed

EXPERT_RANKS, RATE = 2, 0.1


def buffers(model: DistributedDataParallel) -> list[str]:
    """Return a line for each flat gradient buffer of DDP; experts have their own, and a group."""
    kinds = {"experts": model.expert_parallel_buffers, "rest": model.buffers}
    return [
        f"{kind:8} {buffer.grad_data.numel():>7,} gradients, added over "
        f"{distributed.get_process_group_ranks(buffer.data_parallel_group)}, "
        f"times {buffer.gradient_scaling_factor}"
        for kind, (buffer,) in kinds.items()
    ]


def copies_differ(model: torch.nn.Module) -> float:
    """Return the largest difference between this rank's experts and their first copy."""
    group = parallel_state.get_expert_data_parallel_group()
    first = distributed.get_process_group_ranks(group)[0]

    def difference(weight: Tensor) -> float:
        copy = weight.detach().clone()
        distributed.broadcast(copy, first, group=group)
        return (copy - weight).abs().max().item()

    return max(difference(weight) for weight in model.get_submodule("mixture.experts").parameters())


def demo() -> None:
    """Run one process's step, with two copies of each expert."""
    whole, expected_loss, expected = world.alone(one_process)
    stepped = {name: weight - RATE * expected[name] for name, weight in whole.items()}
    with world.groups(expert_model_parallel_size=EXPERT_RANKS):
        model = MoeModel()
        world.load(model, of_this_rank(model, whole))
        model = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        everyone = parallel_state.get_data_parallel_group()
        mine = sequences().chunk(everyone.size(), dim=1)[everyone.rank()]
        loss = model(mine)
        loss.backward()
        with world.Wire() as wire:  # ep.py shows what is sent before
            model.finish_grad_sync()
        for weight in model.parameters():
            weight.data -= RATE * weight.main_grad

        experts = model.module.mixture.local_expert_indices
        share = f"experts {experts} of {EXPERTS}, {mine.size(1)} of {SEQUENCES} sequences"
        world.say("holds", [share, *buffers(model)])
        world.say("sends after backward", wire.lines())
        world.say(
            "a copy of an expert differs after the step", [f"by {copies_differ(model.module)}"]
        )

        mean = loss.detach() / everyone.size()
        distributed.all_reduce(mean, group=everyone)
        gradients = {name: weight.main_grad for name, weight in model.module.named_parameters()}
        weights = world.weights_of(model.module)
        world.agree(
            loss=({"loss": mean}, expected_loss),
            gradients=(gradients, of_this_rank(model.module, expected)),
            weights=(weights, of_this_rank(model.module, stepped)),
        )


if __name__ == "__main__":
    world.run(demo, processes=4)
