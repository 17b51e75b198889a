"""Which layouts are considered at all."""

import pytest
from mqo.matrix import tables
from mqo.scale.choose import Workload, choose
from mqo.scale.memory import Arithmetic

MAMBA = {"num_heads": 256, "head_dim": 64, "num_groups": 8, "state_dim": 128}


def considered(model):
    """The tensor-parallel sizes of the layouts that may divide the model."""
    tried = set()
    work = Workload(model, tables.trainings()["standard"], Arithmetic(), "bf16", 8, 8, 0)
    assert choose(work, lambda layout: tried.add(layout.tensor)) is None
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
