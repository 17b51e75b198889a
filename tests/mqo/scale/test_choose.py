"""Which layouts are considered at all."""

from types import SimpleNamespace

import pytest
from mqo.matrix import tables
from mqo.scale.choose import Workload, choose
from mqo.scale.memory import Arithmetic

MAMBA = {"num_heads": 256, "head_dim": 64, "num_groups": 8, "state_dim": 128}


def considered(model):
    """The tensor-parallel sizes of the layouts that are measured."""
    tried = set()

    def measure(work, layout):
        tried.add(layout.tensor)
        return SimpleNamespace(need=1)

    training = tables.trainings()["standard"]
    assert (
        choose(Workload(model, training, Arithmetic(), "bf16", 8, 8, 0), bool, None, measure)
        is None
    )
    return tried


@pytest.mark.parametrize(
    ("sizes", "tensor"),
    [
        ({}, {1, 2, 4, 8}),
        ({"num_groups": 2}, {1, 2}),
        ({"num_heads": 64}, {1, 2}),  # 32 step sizes of a rank are one block
        ({"state_dim": 16}, {1, 2, 4}),
    ],
)
def test_each_part_of_a_mamba_projection_is_split_into_whole_blocks(sizes, tensor):
    model = tables.models()["llama31-8b"].model_copy(
        update={"mamba": tables.Mamba(**MAMBA | sizes), "pattern": "M-*-" * 8}
    )
    assert considered(model) == tensor
