"""Linear layers by the names of their classes: upstream's own, and look-alikes of the engine's."""

import pytest
import torch
from mqo.megatron import linear
from mqo.megatron.layers import find_layers
from torch.nn import Module, Parameter


class Group:
    def __init__(self, size):
        self._size = size

    def size(self):
        return self._size


def engines(name, *bases, **attributes):
    """A class as Transformer Engine has it."""
    return type(
        name, bases or (Module,), {"__module__": "transformer_engine.pytorch", **attributes}
    )


Base = engines("TransformerEngineBaseModule")
Linear = engines("Linear", Base)
Grouped = engines("GroupedLinear", Base, num_gemms=3)
Two = engines("LayerNormMLP", Base)
Attention = engines("DotProductAttention", Base)


class TEColumnParallelLinear(Linear):
    """Named as upstream's."""


class TERowParallelLinear(Linear):
    """Named as upstream's."""


class ColumnParallelLinear(Module):
    """Named as upstream's own."""


def made(kind, **attributes):
    module = kind()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def weight(rows=8, columns=4):
    return Parameter(torch.zeros(rows, columns))


@pytest.mark.parametrize(
    ("kind", "side", "engines_own", "sited"),
    [
        (TEColumnParallelLinear, linear.COLUMN, True, True),
        (TERowParallelLinear, linear.ROW, True, True),
        (ColumnParallelLinear, linear.COLUMN, False, True),
        (Grouped, None, True, True),
        (torch.nn.Identity, None, False, False),
        (Attention, None, False, False),
    ],
)
def test_a_layer_is_known_by_its_classes(kind, side, engines_own, sited):
    module = kind()
    assert linear.side(module) == side
    assert linear.is_engines(module) == engines_own
    assert linear.has_sites(module) == sited


def test_another_linear_layer_has_no_sites():
    assert not linear.has_sites(torch.nn.Linear(4, 8))


def test_the_engines_attention_asks_for_quantizers_and_has_no_sites():
    model = torch.nn.ModuleDict({"core_attention": Attention()})
    assert linear.asks_for_quantizers(model["core_attention"])
    assert find_layers(model) == []


@pytest.mark.parametrize(
    ("kind", "size"), [(TEColumnParallelLinear, (8, 16)), (TERowParallelLinear, (4, 8))]
)
def test_what_ranks_split_is_told_by_their_group(kind, size):
    module = made(kind, in_features=4, out_features=8, _tp_group=Group(2))
    assert linear.split_size(module) == size
    assert linear.split_size(made(kind, in_features=4, out_features=8)) == (size[0],) * 2
    assert linear.split_size(made(Linear, in_features=4, out_features=8)) is None


def test_a_module_of_several_weights_is_several_layers():
    grouped = made(Grouped, **{f"weight{i}": weight() for i in range(3)})
    two = made(Two, fc1_weight=weight(), fc2_weight=weight(4, 8))
    model = torch.nn.ModuleDict({"grouped": grouped, "mlp": two})
    names = [one.layer.name for one in find_layers(model)]
    assert names == ["grouped.0", "grouped.1", "grouped.2", "mlp.fc1", "mlp.fc2"]


@pytest.mark.parametrize("offset", [0, 3])
def test_grouped_experts_have_the_names_of_experts_one_by_one(offset):
    grouped = made(Grouped, **{f"weight{i}": weight() for i in range(3)})
    routed = torch.nn.ModuleDict({"experts": torch.nn.ModuleDict({"linear_fc1": grouped})})
    routed.local_expert_indices = [offset, offset + 1, offset + 2]
    names = [one.layer.name for one in find_layers(torch.nn.ModuleDict({"mlp": routed}))]
    assert names == [f"mlp.experts.local_experts.{offset + i}.linear_fc1" for i in range(3)]


def test_types_are_those_of_the_source(vendored):
    sites = ("fprop", "dgrad", "wgrad")
    assert linear.source_types().items() >= dict.fromkeys(sites, "none").items()
