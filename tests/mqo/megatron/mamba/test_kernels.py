"""The stand-ins against transformers' Mamba-2, and what they refuse."""

import importlib

import pytest
import torch
from mqo.megatron.mamba import kernels
from mqo.megatron.mamba.kernels import MambaError
from torch.nn.functional import silu, softplus

from .test_scan import BATCH, HEADS, STATE, WIDTH, deviation, operands, recurrence

GROUPS, TOKENS, CHUNK = 2, 50, 16
INNER, CHANNELS = HEADS * WIDTH, HEADS * WIDTH + 2 * GROUPS * STATE
# Both are computed in fp32; transformers' sums are differences in part.
CLOSE = 1e-5


@pytest.fixture(scope="module")
def mamba2():
    """transformers' module of Mamba-2, whose functions are plain torch."""
    pytest.importorskip("transformers")
    module = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    if not hasattr(module, "mamba2_chunk_scan"):
        pytest.skip("this release of transformers has no function for the scan")
    return module


def scan_operands():
    x, dt, a, b, c = (tensor.float() for tensor in operands(TOKENS, GROUPS))
    generator = torch.Generator().manual_seed(1)
    d, dt_bias = (torch.randn(HEADS, generator=generator) for _ in range(2))
    return {"x": x, "dt": dt, "A": a, "B": b, "C": c, "D": d, "dt_bias": dt_bias}


def test_the_scan_is_that_of_transformers(mamba2):
    of = scan_operands()
    ours = {name: tensor.clone().requires_grad_() for name, tensor in of.items()}
    theirs = {name: tensor.clone().requires_grad_() for name, tensor in of.items()}
    y = kernels.mamba_chunk_scan_combined(**ours, chunk_size=CHUNK, dt_softplus=True)
    x = theirs.pop("x")
    z = mamba2.mamba2_chunk_scan(x, **theirs, chunk_size=CHUNK, dt_softplus=True)
    assert deviation(y, z.double()) < CLOSE
    (y**2).sum().backward()
    (z**2).sum().backward()
    for name, right in {"x": x, **theirs}.items():
        assert deviation(ours[name].grad, right.grad.double()) < CLOSE, name


@pytest.mark.parametrize("wide", [False, True])
def test_gate_and_skip_connection_come_after_the_scan(wide):
    of = {name: tensor.double() for name, tensor in scan_operands().items()}
    if wide:
        of["D"] = of["D"][:, None] * torch.linspace(1, 2, WIDTH, dtype=torch.float64)
    z = of["x"].flip(1)
    steps = softplus(of["dt"] + of["dt_bias"])
    right = recurrence(of["x"], steps, of["A"], of["B"], of["C"])
    right = (right + of["x"] * of["D"].reshape(HEADS, -1)) * silu(z)
    options = {name: tensor.float() for name, tensor in (of | {"z": z}).items()}
    y = kernels.mamba_chunk_scan_combined(**options, chunk_size=CHUNK, dt_softplus=True)
    assert deviation(y, right) < CLOSE
    options |= {name: options[name].bfloat16() for name in ("x", "z", "dt", "B", "C")}
    y = kernels.mamba_chunk_scan_combined(**options, chunk_size=CHUNK, dt_softplus=True)
    assert y.dtype == torch.bfloat16
    assert deviation(y, right) < 2e-2  # operands of 8 bits


def test_the_path_for_training_is_convolution_scan_and_gate_in_turn():
    generator = torch.Generator().manual_seed(2)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    packed = draw(BATCH, TOKENS, INNER + CHANNELS + HEADS)
    weight, bias = draw(CHANNELS, 4), draw(CHANNELS)
    a, d, dt_bias = -draw(HEADS).exp(), draw(HEADS), draw(HEADS)
    y = kernels.mamba_split_conv1d_scan_combined(
        packed, weight, bias, dt_bias, a, d, CHUNK, headdim=WIDTH, ngroups=GROUPS
    )
    z, mixed, dt = packed.split([INNER, CHANNELS, HEADS], -1)
    mixed = kernels.causal_conv1d_fn(mixed.transpose(1, 2), weight, bias, "silu").transpose(1, 2)
    x, b, c = mixed.split([INNER, GROUPS * STATE, GROUPS * STATE], -1)
    shape = (BATCH, TOKENS, -1)
    right = kernels.mamba_chunk_scan_combined(
        x.view(*shape, WIDTH), dt, a, b.view(*shape, STATE), c.view(*shape, STATE), CHUNK, d,
        z.reshape(*shape, WIDTH), dt_bias, True,
    )  # fmt: skip
    assert torch.equal(y, right.view(*shape))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seq_idx", torch.zeros(BATCH, TOKENS)),
        ("initial_states", torch.zeros(BATCH, HEADS, WIDTH, STATE)),
        ("return_final_states", True),
        ("dt_limit", (0.0, 1.0)),
        ("state_dtype", torch.bfloat16),
        ("never_heard_of", 1),
    ],
)
@pytest.mark.parametrize("function", ["mamba_chunk_scan_combined", "causal_conv1d_fn"])
def test_an_option_without_an_implementation_is_refused_by_name(function, name, value):
    of = scan_operands() | {"chunk_size": CHUNK}
    if function == "causal_conv1d_fn":
        of = {"x": torch.zeros(1, 3, 5), "weight": torch.zeros(3, 4)}
    getattr(kernels, function)(**of, seq_idx=None, return_final_states=False)
    with pytest.raises(MambaError, match=rf"^{function} .* {name}\b.*Expected: "):
        getattr(kernels, function)(**of, **{name: value})


def test_an_activation_that_is_not_silu_is_refused():
    with pytest.raises(MambaError, match="gelu"):
        kernels.causal_conv1d_fn(torch.zeros(1, 3, 5), torch.zeros(3, 4), activation="gelu")


def test_they_are_used_without_the_package_and_without_cuda(monkeypatch):
    for cuda in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        assert kernels.are_needed(imported=False)
        assert kernels.are_needed(imported=True) is not cuda
