import pytest

from .conftest import executed

OPTIMIZER = """
class MixedPrecisionOptimizer:
    def step_with_ready_grads(self):
        "Words."
        calls.append("step")
        return True


class FP32Optimizer:
    def step_with_ready_grads(self):
        calls.append("step")
        return True


class ChainedOptimizer:
    def step_with_ready_grads(self):
        calls.append("chained")
"""
CHECKPOINTING = """
def load_checkpoint(model):
    calls.append("load")
"""


def run(module, path, source):
    calls = []
    module("mqo.quant", weights_changed=lambda: calls.append("epoch"))
    return executed("weight_epochs", path, source, calls=calls), calls


@pytest.mark.parametrize("name", ["MixedPrecisionOptimizer", "FP32Optimizer"])
def test_a_step_begins_an_epoch(module, name):
    scope, calls = run(module, "megatron/core/optimizer/optimizer.py", OPTIMIZER)
    assert scope[name]().step_with_ready_grads()
    assert calls == ["epoch", "step"]


def test_loading_begins_an_epoch(module):
    scope, calls = run(module, "megatron/training/checkpointing.py", CHECKPOINTING)
    scope["load_checkpoint"](None)
    assert calls == ["epoch", "load"]
