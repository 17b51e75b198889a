"""Upstream's Mamba layer on these functions: against transformers' mixer, and on two ranks."""

from pathlib import Path

import pytest
import torch
from mqo.megatron.layers import find_layers
from mqo.megatron.mamba.spec import mamba_layer
from mqo.quant.record import RECORDER

from ....vendored_tree import run_ranks
from .test_kernels import mamba2 as mamba2
from .test_scan import deviation

pytest.importorskip("megatron.core.ssm.mamba_mixer")
pytest.importorskip("einops")

HIDDEN, HEADS, WIDTH, GROUPS, STATE = 32, 8, 8, 2, 16
NAME = "decoder.layers.0"


@pytest.fixture(scope="module")
def layer(groups):
    """Upstream's Mamba layer, local, with the weights of a seed."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import build_module

    config = TransformerConfig(
        **{"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2},
        **{"mamba_num_heads": HEADS, "mamba_head_dim": WIDTH, "mamba_num_groups": GROUPS},
        **{"mamba_state_dim": STATE, "normalization": "RMSNorm", "hidden_dropout": 0.0},
        use_cpu_initialization=True,
    )
    return build_module(mamba_layer(config), config, layer_number=1, pg_collection=groups)


def hidden(tokens):
    """Hidden states [tokens, batch, hidden]."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(tokens, 2, HIDDEN, generator=generator)


@pytest.mark.parametrize("tokens", [5, 128, 200])
def test_the_mixer_is_that_of_transformers(layer, mamba2, tokens):
    from transformers import Mamba2Config

    config = Mamba2Config(
        **{"hidden_size": HIDDEN, "num_heads": HEADS, "head_dim": WIDTH, "n_groups": GROUPS},
        **{"state_size": STATE, "chunk_size": 64, "num_hidden_layers": 1},
    )
    mixer, theirs = layer.mixer, mamba2.Mamba2Mixer(config, 0)
    names = {"conv1d_weight": "conv1d.weight", "conv1d_bias": "conv1d.bias"}
    weights = {names.get(name, name): w.detach() for name, w in mixer.named_parameters()}
    theirs.load_state_dict(weights)
    ours, right = (hidden(tokens).requires_grad_() for _ in range(2))
    y, z = mixer(ours)[0], theirs(right.transpose(0, 1)).transpose(0, 1)
    assert deviation(y, z.double()) < 1e-5
    mixer.zero_grad()
    (y**2).sum().backward()
    (z**2).sum().backward()
    assert deviation(ours.grad, right.grad.double()) < 1e-5
    grads = {names.get(name, name): w.grad for name, w in mixer.named_parameters()}
    for name, weight in theirs.named_parameters():
        assert deviation(grads[name], weight.grad.double()) < 1e-5, name


def test_its_linear_layers_are_named_and_call_their_sites(layer, monkeypatch):
    from megatron.core.tensor_parallel import layers

    stack = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})
    labeled = find_layers(torch.nn.ModuleDict({"decoder": stack}))
    linear = {each.layer.name for each in labeled if each.layer.sited}
    assert linear == {f"{NAME}.mixer.in_proj", f"{NAME}.mixer.out_proj"}
    real = layers.gemm_operands
    monkeypatch.setattr(layers, "gemm_operands", lambda site, _, owner: real(site, "mxfp8", owner))
    layer(hidden(40)).sum().backward()
    ran = {(r.site, r.layer) for r in RECORDER.entries() if r.quant_type == "mxfp8"}
    assert ran == {(site, name) for site in ("fprop", "dgrad", "wgrad") for name in linear}


def test_two_tensor_parallel_ranks_compute_what_one_process_does():
    assert "EQUAL" in run_ranks(Path(__file__).with_name("two_ranks.py"))
