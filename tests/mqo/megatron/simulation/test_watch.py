"""Whose an operation is: its line, its layer, forward or backward."""

import types

import torch
from mqo.megatron.simulation.watch import BACKWARD, ROOTS, Watch, named_modules
from torch.utils.checkpoint import checkpoint

SOURCE = """
def double(x):
    return x * 2

def outer(x, function):
    return function(x)
"""


def tree_code(path):
    """Functions that seem to stand in a file of the tree, or of mqo."""
    root = ROOTS[0] if path.startswith("mqo/") else ROOTS[1]
    module = types.ModuleType("code")
    exec(compile(SOURCE, str(root / path), "exec"), module.__dict__)
    return module


def calls(function):
    """What ran: (operation, line, layer, quantizes, backward, recomputed)."""
    seen = []

    def observe(call):
        name = call.func.overloadpacket.__name__ if call.func else call.args[0]
        seen.append((name, *call.origin, call.backward, call.recomputed))

    watch = Watch(observe)
    with watch:
        function(watch)
    return seen


def test_the_line_is_the_innermost_of_the_tree():
    code = tree_code("megatron/core/a.py")
    (call,) = calls(lambda watch: code.outer(torch.ones(2), lambda x: code.double(x)))[1:]
    assert call[:2] == ("mul", "megatron/core/a.py:3")


def test_a_quantizers_line_is_its_callers():
    layer, quantizer = tree_code("megatron/core/a.py"), tree_code("mqo/quant/b.py")
    (call,) = calls(lambda watch: layer.outer(torch.ones(2), quantizer.double))[1:]
    assert call[1:4] == ("megatron/core/a.py:6", "", True)


def test_what_autograd_runs_is_named_after_what_it_differentiates():
    code = tree_code("megatron/core/a.py")
    x = torch.ones(2, requires_grad=True)
    found = calls(lambda watch: code.double(x).sum().backward())
    forward = next(call for call in found if call[0] == "mul" and not call[4])
    backward = next(call for call in found if call[0] == "mul" and call[4])
    assert forward[1] == "megatron/core/a.py:3"
    assert backward[1] == BACKWARD + "megatron/core/a.py:3"
    assert not backward[5]


def test_a_forward_pass_within_the_backward_pass_is_recomputed():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    x = torch.ones(2, 4, requires_grad=True)

    def run(watch):
        with watch.following([model]):
            checkpoint(model, x, use_reentrant=True).sum().backward()

    found = [(call[0], call[2], call[4], call[5]) for call in calls(run) if call[0] == "tanh"]
    assert found == [("tanh", "1", False, False), ("tanh", "1", True, True)]


def test_modules_are_named_from_the_unwrapped_model():
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2))
    wrapped = torch.nn.Module()
    wrapped.module = torch.nn.Module()
    wrapped.module.module = inner
    assert [name for name, _ in named_modules(wrapped)] == ["", "", "", "0"]


def test_what_is_hidden_is_not_told_of():
    def run(watch):
        with watch.hidden():
            made = torch.ones(2) * 2
        watch.tell(None, ("fused",), {}, made)

    assert [call[0] for call in calls(run)] == ["fused"]
