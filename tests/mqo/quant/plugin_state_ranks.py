"""Run as a program: the states of a user's quantizer on two ranks.

python plugin_state_ranks.py FOLDER_OF_THE_DEMOS FOLDER_TO_WRITE_TO
"""

import sys

sys.path.insert(0, sys.argv[1])
import torch
import world
from mqo.quant.model import quantize_model
from mqo.quant.plugin_decorators import end_step, quantizer
from mqo.quant.plugin_states import PluginStates
from mqo.quant.plugins import PLUGINS
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

WIDE, STEPS, RANKS = 16, 4, 2


@quantizer("delayed", state={"amax": 4.0, "parts": [0.0, 0.0]})
def delayed(x, context):
    amax = context.state["amax"]
    context.note("amax", x.abs().max())
    return (x / amax * 7).round().clamp(-7, 7) * amax / 7


@end_step("delayed")
def end(state, notes, step, options):
    state["amax"] = (state["amax"] + notes["amax"]) / 2
    return state | {"parts": notes.get("parts", state["parts"])}


# -- notes of the ranks ----------------------------------------------------------------------------


def noted():
    """The states after one step in which the second rank has an operand more."""
    rank, states = distributed.get_rank(), PluginStates()
    both, mine = ("fprop", "both", "x"), ("fprop", f"of {rank}", "x")
    for operand in (both, mine):
        notes = [("amax", torch.tensor(2.0 + rank))]
        notes.append(("parts", torch.tensor([1.0 - rank, torch.inf * (rank or -1)])))
        states.note(PLUGINS["delayed"], operand, notes)
    states.end_step(1, {"delayed": {}})
    return {name: value.tolist() for name, value in states.state_dict().items()}


EXPECTED = {
    **{"delayed/fprop/both/x/amax": 3.5, "delayed/fprop/both/x/parts": [1.0, torch.inf]},
    **{"delayed/fprop/of 0/x/amax": 3.0, "delayed/fprop/of 0/x/parts": [1.0, -torch.inf]},
    **{"delayed/fprop/of 1/x/amax": 3.5, "delayed/fprop/of 1/x/parts": [0.0, torch.inf]},
}


# -- a training ------------------------------------------------------------------------------------


def batch(step, rank):
    return torch.randn(4, WIDE, generator=torch.Generator().manual_seed(10 * step + rank))


def train(ranks, wrap, rate):
    """The weights and states after some steps with the micro-batches of `ranks`."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE))
    shared = quantize_model(model, "delayed")
    run = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(STEPS):
        for rank in ranks:
            run(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    states = {name: value.clone() for name, value in shared.state_dict().items()}
    return states | {name: weight.detach() for name, weight in model.named_parameters()}


def check():
    assert noted() == EXPECTED, noted()
    # The same losses, of which DDP takes the mean.
    ours = train([distributed.get_rank()], DistributedDataParallel, 0.1 * RANKS)
    theirs = train(range(RANKS), lambda model: model, 0.1)
    assert ours.keys() == theirs.keys() and any("/" in name for name in ours)
    for name, value in ours.items():
        assert value.equal(theirs[name]), name
    every = [None] * RANKS
    distributed.all_gather_object(every, {name: value.tolist() for name, value in ours.items()})
    assert every[0] == every[1]
    print("EQUAL")


world.run(check, processes=RANKS)
