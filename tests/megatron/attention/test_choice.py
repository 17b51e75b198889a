from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from megatron.attention import (
    FusedAttentionError,
    choice,
    fused_attention,
    fused_context,
    obstacle,
    runs_fused,
)
from megatron.quant import config, set_step

NONE = {"qk": "none", "pv": "none"}


class Layer:
    """What the choice reads of a DotProductAttention."""

    def __init__(self, backend="auto", dropout=0.0):
        self.config = SimpleNamespace(sequence_parallel=False)
        if backend:
            self.config.attention_backend = SimpleNamespace(name=backend)
        self.attn_mask_type = SimpleNamespace(name="causal")
        self.scale_mask_softmax = SimpleNamespace(scale=None, window_size=None)
        self.softmax_offset = None
        self.softmax_scale = 0.25
        self.layer_number = 3
        self.attention_dropout = torch.nn.Dropout(dropout)


class Tracker:
    """Stands for upstream's RNG tracker: a generator state of its own."""

    def __init__(self):
        self.state = torch.Generator().manual_seed(7).get_state()
        self.forks = 0

    @contextmanager
    def fork(self):
        self.forks += 1
        before = torch.get_rng_state()
        torch.set_rng_state(self.state)
        yield
        self.state = torch.get_rng_state()
        torch.set_rng_state(before)


def tensors(sq=4, sk=4, device=None):
    return torch.ones(sq, 1, 2, 8, device=device), torch.ones(sk, 1, 2, 8, device=device)


def causal(sq=4, sk=4):
    return torch.ones(1, 1, sq, sk, dtype=torch.bool).triu(sk - sq + 1)


@pytest.mark.parametrize("backend", ["auto", "flash", "fused", ""])
@pytest.mark.parametrize("mask", [None, causal()], ids=["no mask", "a causal mask"])
def test_a_plain_causal_layer_runs_fused(backend, mask):
    assert runs_fused(Layer(backend), NONE, *tensors(), mask)


@pytest.mark.parametrize("backend", ["unfused", "local"])
def test_unless_it_is_not_to(backend):
    assert not runs_fused(Layer(backend), NONE, *tensors(), None)


def test_a_backend_may_be_named_by_text():
    layer = Layer()
    layer.config.attention_backend = "unfused"
    assert not runs_fused(layer, NONE, *tensors(), None)


def test_a_qk_type_fuses_and_a_pv_type_does_not():
    assert obstacle(Layer(), NONE | {"qk": "mxfp8"}, *tensors(), None) == ""
    assert "pv = mxfp4" in obstacle(Layer(), NONE | {"pv": "mxfp4"}, *tensors(), None)
    assert "pv = no plain literal" in obstacle(Layer(), {"qk": "none"}, *tensors(), None)


def test_a_layer_that_is_exempt_runs_as_if_pv_had_no_type():
    layer = Layer()
    layer.mqo_exempt = True
    assert obstacle(layer, NONE | {"pv": "mxfp4"}, *tensors(), None) == ""


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("attn_mask_type.name", "padding", "mask type is padding"),
        ("attn_mask_type", None, "mask type is None"),
        ("scale_mask_softmax.window_size", (128, 0), "sliding window"),
        ("softmax_offset", torch.zeros(2), "offset"),
        ("scale_mask_softmax.scale", 3, "--apply-query-key-layer-scaling"),
        ("attention_dropout.p", 0.1, "drops out"),
    ],
)
def test_what_a_layer_has_that_no_kernel_does(name, value, why):
    layer = Layer()
    owner, _, attribute = name.rpartition(".")
    setattr(getattr(layer, owner) if owner else layer, attribute, value)
    assert why in obstacle(layer, NONE, *tensors(), None)
    assert not runs_fused(layer, NONE, *tensors(), None)


def test_attributes_of_later_releases_may_be_missing():
    layer = Layer()
    del layer.softmax_offset, layer.scale_mask_softmax.window_size
    assert obstacle(layer, NONE, *tensors(), None) == ""


def test_dropout_counts_in_training_alone():
    layer = Layer(dropout=0.1)
    layer.attention_dropout.eval()
    assert obstacle(layer, NONE, *tensors(), None) == ""


def test_a_device_without_kernels():
    assert "meta" in obstacle(Layer(), NONE, *tensors(device="meta"), None)


@pytest.mark.parametrize("mask", [None, causal(2, 4)])
def test_a_part_of_the_queries_is_not_fused(mask):
    assert "2 queries for 4 keys" in obstacle(Layer(), NONE, *tensors(2, 4), mask)


@pytest.mark.parametrize("mask", [None, causal(1, 4)])
def test_a_single_query_is(mask):
    assert obstacle(Layer(), NONE, *tensors(1, 4), mask) == ""


@pytest.mark.parametrize("mask", [~causal(), causal() * 1.0, torch.zeros(4, 4) > 1])
def test_any_other_mask_is_not(mask):
    assert "mask is not the plain causal one" in obstacle(Layer(), NONE, *tensors(), mask)


@pytest.mark.parametrize("backend", ["flash", "fused"])
def test_a_kernel_that_is_demanded_and_impossible_is_an_error_with_the_reason(backend):
    layer = Layer(backend)
    with pytest.raises(FusedAttentionError, match=rf"layer 3 .*pv = mxfp8.*-backend {backend} "):
        runs_fused(layer, NONE | {"pv": "mxfp8"}, *tensors(), None)
    layer.mqo_layer = "decoder.layers.2.self_attention.core_attention"
    with pytest.raises(FusedAttentionError, match=r"decoder\.layers\.2\."):
        runs_fused(layer, {}, *tensors(), None)


# -- the context -------------------------------------------------------------------------------


def test_the_context_has_the_layers_scale(operands):
    found = fused_context(Layer(), *operands(), Tracker())
    assert torch.equal(found, fused_attention(*operands(), scale=0.25, causal=True))


def test_a_single_query_sees_every_key(operands):
    found = fused_context(Layer(), *operands(sq=1), Tracker())
    assert torch.equal(found, fused_attention(*operands(sq=1), scale=0.25, causal=False))


@pytest.fixture
def dropped(monkeypatch):
    """A kernel that drops out, which the CPU has none of: it drops from the value."""

    def drop(query, key, value, *, dropout, **rest):
        return torch.nn.functional.dropout(value, dropout)

    monkeypatch.setattr(choice, "fused_attention", drop)


def test_dropout_takes_its_numbers_from_the_tracker(operands, dropped):
    layer, tracker = Layer(dropout=0.5), Tracker()
    before = torch.get_rng_state()
    first = fused_context(layer, *operands(), tracker)
    second = fused_context(layer, *operands(), tracker)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first, second)
    assert torch.equal(first, fused_context(layer, *operands(), Tracker()))
    assert 0.3 < (first == 0).float().mean() < 0.7


def test_with_sequence_parallelism_it_takes_the_ranks_own(operands, dropped):
    layer, tracker = Layer(dropout=0.5), Tracker()
    layer.config.sequence_parallel = True
    torch.manual_seed(1)
    first = fused_context(layer, *operands(), tracker)
    torch.manual_seed(1)
    assert torch.equal(first, fused_context(layer, *operands(), tracker))
    assert tracker.forks == 0


def test_without_dropout_no_generator_is_touched(operands):
    tracker = Tracker()
    fused_context(Layer(), *operands(), tracker)
    assert tracker.forks == 0


def test_a_schedule_of_pv_chooses_step_by_step(tmp_path, monkeypatch):
    (tmp_path / "quant.toml").write_text('[schedule]\npv = "none until 2, then mxfp8"\n')
    monkeypatch.setenv(config.ENVIRONMENT_VARIABLE, str(tmp_path / "quant.toml"))
    config.reset()
    chosen = []
    for step in range(4):
        set_step(step)
        chosen.append(runs_fused(Layer(), NONE, *tensors(), None))
    assert chosen == [True, True, False, False]
    set_step(0)
    monkeypatch.delenv(config.ENVIRONMENT_VARIABLE)
    config.reset()
