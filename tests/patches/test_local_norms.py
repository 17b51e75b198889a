"""Norms of local layers beside apex and Transformer Engine: look-alikes, and the real source."""

import json
import os
import sys
from pathlib import Path

import pytest

from .. import forking

STUBS = Path(__file__).parents[1] / "stubs"

# apex is loaded before, as on a machine with CUDA: so it is not hidden.
BUILD = """
import json
import types
import apex
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import transformer_block
from megatron.core.transformer.transformer_config import TransformerConfig

torch.distributed.init_process_group(
    "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
)
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)


def norms(normalization, spec):
    sizes = dict(num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=128)
    config = TransformerConfig(
        **sizes, use_cpu_initialization=True, normalization=normalization, add_bias_linear=False
    )
    block = transformer_block.TransformerBlock(config, spec(config))
    made = [m for m in block.modules() if "Norm" in type(m).__name__]
    for norm in made:
        if normalization == "RMSNorm":
            assert norm(torch.ones(2, 64)).isfinite().all()
    return sorted({type(m).__name__ for m in made}), len(made)


def dense(config):
    return get_gpt_layer_local_spec(normalization=config.normalization)


def untold(config):
    return get_gpt_layer_local_spec()


def block(config):
    return get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization
    )


class OfTransformerEngine:
    def __init__(self, **sizes):
        raise RuntimeError("not for local layers")


fused = types.SimpleNamespace(submodules=types.SimpleNamespace(input_layernorm=torch.nn.Identity))
found = {"upstream's": transformer_block.LayerNormImpl.__name__}
found |= {spec.__name__: norms("RMSNorm", spec) for spec in (dense, untold, block)}
found["LayerNorm"] = norms("LayerNorm", block)
transformer_block.LayerNormImpl = OfTransformerEngine
found["beside Transformer Engine"] = norms("RMSNorm", dense)
found["fused"] = transformer_block.final_norm(fused, "upstream's")
print(json.dumps(found))
"""


def program(vendored, text, *stubs):
    """The JSON that a program prints last; it imports the patched Megatron beside stub packages."""
    paths = [vendored.root, *(STUBS / stub for stub in stubs)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = forking.run([sys.executable, "-W", "ignore", "-c", text], env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def built(vendored):
    return program(vendored, BUILD, "with_apex")


@pytest.mark.parametrize("spec", ["dense", "block", "untold"])
def test_rms_norms_beside_apex_are_torchs(built, spec):
    assert built["upstream's"] == "FusedLayerNorm"  # chosen at import, and refused RMSNorm
    assert built[spec] == [["RMSNorm"], 5]


def test_layer_norms_are_still_apexs(built):
    assert built["LayerNorm"] == [["FusedLayerNorm"], 5]


def test_the_last_norm_of_local_layers_is_theirs_whatever_upstream_would_take(built):
    assert built["beside Transformer Engine"] == [["RMSNorm"], 5]


def test_layers_without_a_local_norm_keep_upstreams_choice(built):
    assert built["fused"] == "upstream's"


def test_without_cuda_neither_package_is_imported(vendored):
    text = """
import json, sys
import megatron.core, megatron.training.training
from megatron.core import optimizer
from megatron.core.extensions.transformer_engine import HAVE_TE
names = {name: m is None for name, m in sys.modules.items() if name in ("apex", "amp_C")}
te = [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]
print(json.dumps([optimizer.USING_PYTORCH_OPTIMIZER, HAVE_TE, names, te]))
"""
    found = program(vendored, text, "with_apex", "with_transformer_engine")
    assert found[:2] == [True, False]
    assert found[2]["apex"] and found[3] == ["transformer_engine"]
