"""The distributed optimizer's state on torch's Adam: a look-alike of our own."""

import types

import pytest
import torch

from .conftest import executed

PATH = "megatron/core/optimizer/distrib_optimizer.py"
SOURCE = """
import torch


class DistributedOptimizer:
    def __init__(self, model):
        # In fp32 the main parameters are parts of the model's own.
        self.optimizer = torch.optim.Adam([p.view(-1)[:4].detach().requires_grad_() for p in model])
        self.model = model

    def main(self, model_param):
        return self.model[model_param]

    def state_dict(self):
        inner_state_dict = self.optimizer.state_dict()
        steps = list(set([s["step"].item() for s in inner_state_dict["state"].values()]))
        (only,) = steps
        return {"step": only}

    def load_state_dict(self, state_dict):
        step = torch.tensor(state_dict["step"])
        empty = {k: {"exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)} for k in range(2)}
        for s in empty.values():
            s["step"] = step
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": empty, "param_groups": groups})

    def _set_main_param_and_optimizer_states(self, model_param, tensors):
        parameter = self.optimizer.param_groups[0]["params"][model_param]
        dst_tensors = dict(self.optimizer.state[parameter])
        dst_tensors["param"] = self.main(model_param)
        for key in sorted(dst_tensors):
            if not isinstance(tensors[key], torch.Tensor):
                raise TypeError(key)
            dst_tensors[key].copy_(tensors[key])
"""


@pytest.fixture
def optimizer():
    scope = executed("distributed_optimizer", PATH, SOURCE)
    model = [torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)]
    return scope["DistributedOptimizer"](model)


def test_a_state_that_is_not_there_yet_has_made_no_step(optimizer):
    assert optimizer.state_dict() == {"step": 0}


def test_each_parameter_counts_its_own_steps(optimizer):
    optimizer.load_state_dict({"step": 3.0})
    inner = optimizer.optimizer
    for parameter in inner.param_groups[0]["params"]:
        parameter.grad = torch.ones(4)
    inner.step()
    assert [state["step"].item() for state in inner.state.values()] == [4, 4]
    assert optimizer.state_dict() == {"step": 4}


@pytest.mark.parametrize("stale", [{}, {"step": torch.tensor(0.0)}])
def test_a_parameters_state_is_loaded_but_for_the_count_of_steps(optimizer, stale):
    optimizer.load_state_dict({"step": 3.0})
    loaded = {name: torch.rand(4) for name in ("param", "exp_avg", "exp_avg_sq")}
    optimizer._set_main_param_and_optimizer_states(1, loaded | stale)
    state = types.SimpleNamespace(**optimizer.optimizer.state_dict()["state"][1])
    assert optimizer.main(1).equal(loaded["param"])
    assert state.exp_avg.equal(loaded["exp_avg"])
    assert state.exp_avg_sq.equal(loaded["exp_avg_sq"])
    assert state.step == 3
