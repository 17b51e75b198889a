"""What tensors without data answer, and that nothing of it stays."""

import pytest
import torch
from mqo.megatron.simulation.unreal import without_data
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


def test_a_value_that_is_read_is_one():
    with without_data():
        assert torch.zeros(1).item() == 1.0
        assert torch.zeros(1, dtype=torch.int).item() == 1
        assert bool(torch.zeros(1).isnan().any()) is True
        assert torch.zeros(3).tolist() == [1.0] * 3


def test_a_model_changes_its_dtype_and_keeps_its_ties():
    with without_data():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        model[0].weight.mark = "kept"
        model.register_buffer("table", torch.ones(2))
        model.bfloat16()
        assert model[0].weight is model[1].weight
        assert isinstance(model[0].weight, nn.Parameter)
        assert model[0].weight.mark == "kept"
        assert {t.dtype for t in (*model.parameters(), *model.buffers())} == {torch.bfloat16}


class Sharer:
    """Holds a parameter of a module, as upstream's context parallelism of a Mamba mixer does."""

    __module__ = "megatron.core.sharer"

    def __init__(self, parameter):
        self.shared = parameter


def test_an_object_of_upstream_gets_the_parameter_that_replaces_its_own():
    with without_data():
        model = nn.Linear(4, 4)
        model.sharer = Sharer(model.weight)
        model.bfloat16()
        assert model.sharer.shared is model.weight


def test_tensors_of_tensors_are_stacked_and_numbers_are_numbers():
    with without_data():
        one = torch.ones(())
        assert torch.tensor([[one, one], [one, one]]).shape == (2, 2)
        assert torch.tensor([1, 2, 3], dtype=torch.int8).dtype == torch.int8
        assert torch.tensor([]).shape == (0,)
        assert torch.tensor(2.5).shape == ()


def test_objects_of_other_ranks_are_ones_own():
    with without_data():
        found = [None, None]
        torch.distributed.all_gather_object(found, {"a": 1})
        assert found == [{"a": 1}] * 2


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_real_again(fails):
    before = (nn.Module._apply, torch.tensor, torch.distributed.all_gather_object)
    try:
        with without_data():
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert (nn.Module._apply, torch.tensor, torch.distributed.all_gather_object) == before
    assert torch.full((1,), 7).item() == 7
    assert not isinstance(torch.ones(1), FakeTensor)
