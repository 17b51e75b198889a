"""Run as a program: two ranks train the engine's layers and local ones, to the same operands.

python ranks.py FOLDER, with MQO_TEST_ENGINE. Leaves with 1 where a bit differs.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))
from tests.mqo.megatron.transformer_engine.installed import VERSION  # before megatron.core

# isort: split
import torch
import world
from mqo.megatron.transformer_engine.releases import multiplies_plain_tensors

from tests.mqo.megatron.transformer_engine import models
from tests.mqo.megatron.transformer_engine.models import DENSE, EXPERTS

KINDS = ("mxfp8", "nvfp4")  # of a scale a block, and of one more for the tensor of all ranks


def compare(quant_type, sizes, engines=(), **both):
    text = models.all_gemms(quant_type)
    models.options(sys.argv[1], text)
    local = models.build(False, sizes, **both)
    ours = models.give_weights(models.build(True, sizes, **both, **dict(engines)), local)
    losses, theirs = models.train(local)
    models.options(sys.argv[1], text)
    again, found = models.train(ours)
    models.assert_same_operands(found, theirs)
    assert torch.allclose(torch.tensor(again), torch.tensor(losses), rtol=0, atol=1e-5)


def check():
    with world.groups(tensor_model_parallel_size=2):
        for quant_type in KINDS:
            for sequence_parallel in (False, True):
                sizes = {**DENSE, "tensor_model_parallel_size": 2}
                compare(quant_type, sizes, sequence_parallel=sequence_parallel)
    with world.groups(expert_model_parallel_size=2):
        sizes = {**EXPERTS, "expert_model_parallel_size": 2}
        compare("mxfp8", sizes)
        if multiplies_plain_tensors(VERSION):
            compare("nvfp4", sizes, {"moe_grouped_gemm": True})
    print("EQUAL")


world.run(check, processes=2)
