"""The largest magnitude of a tensor, and of one whose shards lie on several ranks."""

import math
import struct
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mqo.megatron.layers import label_layers, shards_of
from mqo.quant.backend import fake_quantize
from mqo.quant.gemms import gemm_operands
from mqo.quant.quantization import PROCESS
from mqo.quant.record import RECORDER
from mqo.quant.spec import QuantSpec
from mqo.quant.tensor_amax import Shards, largest, shared_amax
from torch import nn

TWO, ONE = (SimpleNamespace(size=lambda ranks=ranks: ranks) for ranks in (2, 1))
# Every pattern, NaNs of all kinds among them.
anything = st.integers(0, 2**32 - 1).map(lambda n: struct.unpack("<f", struct.pack("<I", n))[0])


def magnitude(values):
    found = [abs(value) for value in values]
    return math.nan if any(map(math.isnan, found)) else max(found, default=0.0)


def matches(found, expected):
    return found == expected or (math.isnan(found) and math.isnan(expected))


class ColumnParallelLinear(nn.Linear):
    tp_group = TWO


class RowParallelLinear(ColumnParallelLinear):
    """Upstream's is no subclass of the other: the nearest name counts."""


class DotProductAttention(nn.Module):
    tp_group = TWO


class LatentAttention(DotProductAttention):
    pass


class Alone(ColumnParallelLinear):
    tp_group = ONE


class Ungrouped(ColumnParallelLinear):
    tp_group = None


class Embedding(nn.Embedding):
    tp_group = TWO


def share_with(value, patch):
    """Have another rank's largest be `value`; return the list of what is reduced from now on."""
    reduced = []
    theirs = torch.tensor(value, dtype=torch.float32).view(torch.int32) & 0x7FFFFFFF

    def all_reduce(tensor, op, group):
        assert op == torch.distributed.ReduceOp.MAX
        reduced.append((tensor.clone(), group))
        tensor.copy_(torch.maximum(tensor, theirs))

    patch.setattr(torch.distributed, "all_reduce", all_reduce)
    return reduced


@pytest.fixture
def reduced(monkeypatch):
    """What is reduced with another rank, which has 1000: [(pattern, group)]."""
    return share_with(1e3, monkeypatch)


@given(st.lists(anything, max_size=40), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_largest_is_the_largest_magnitude(values, dtype):
    x = torch.tensor(values, dtype=torch.float32).to(getattr(torch, dtype))
    found = largest(x)
    assert (found.dtype, found.shape) == (torch.float32, ())
    assert matches(found.item(), magnitude(x.float().tolist()))
    assert matches(largest(x.requires_grad_()).item(), found.item())


@given(st.lists(anything, max_size=5), anything)
def test_ranks_share_the_largest_of_all_and_any_nan(values, theirs):
    x = torch.tensor(values, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        share_with(theirs, patch)
        found = shared_amax(x, "weight", Shards(("weight",), TWO))
    assert matches(found.item(), magnitude([*x.tolist(), theirs]))


@pytest.mark.parametrize(
    ("module", "operands"),
    [
        (ColumnParallelLinear(4, 4), {"weight", "grad"}),
        (RowParallelLinear(4, 4), {"weight", "x"}),
        (DotProductAttention(), {"query", "key", "probs", "value"}),
        (LatentAttention(), {"query", "key", "probs", "value"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_layers_class_says_which_operands_its_ranks_share(module, operands):
    found = shards_of(module)
    assert set(found.operands) == operands
    assert found.group is TWO


@pytest.mark.parametrize("module", [Alone(4, 4), Ungrouped(4, 4), Embedding(4, 4), nn.Linear(4, 4)])
def test_a_layer_of_one_rank_shares_nothing(module):
    assert shards_of(module) is None


def test_a_tied_weight_is_the_heads(reduced):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.share_embeddings_and_output_weights = True
            self.embedding = nn.ModuleDict({"word_embeddings": Embedding(8, 4)})
            self.output_layer = ColumnParallelLinear(4, 8)
            self.output_layer.weight = None

    model = Model()
    label_layers(model)
    weight = model.embedding.word_embeddings.weight
    operands = gemm_operands("fprop", "fp8_tensor_e4m3", weight)
    spec, x = QuantSpec("fp8_tensor_e4m3"), torch.randn(3, 4)
    assert operands.rhs(weight).equal(fake_quantize(weight, spec, amax=torch.tensor(1e3)))
    assert operands.lhs(x).equal(fake_quantize(x, spec))
    assert [group for _, group in reduced] == [TWO]


@pytest.fixture
def row():
    """The weight of a layer whose input and weight two ranks share."""
    layer = RowParallelLinear(64, 32, bias=False)
    label_layers(nn.ModuleDict({"proj": layer}))
    return layer.weight


@pytest.mark.parametrize("kind", ["mxfp8", "hifp8", "hif4", "fp8_block"])
def test_a_format_without_a_scale_of_the_tensor_asks_nobody(reduced, row, kind):
    operands = gemm_operands("fprop", kind, row)
    assert operands.rhs(row).equal(fake_quantize(row, QuantSpec(kind)))
    operands.lhs(torch.randn(3, 64))
    assert reduced == []


def test_an_excluded_layer_asks_nobody(reduced, options, row):
    options('[layers]\nexclude = ["proj"]\n')
    assert gemm_operands("fprop", "nvfp4", row).rhs(row) is row
    assert reduced == []


@pytest.mark.parametrize("kind", ["fp8_tensor_e4m3", "nvfp4"])
def test_an_empty_shard_takes_part(reduced, row, kind):
    assert gemm_operands("fprop", kind, row).lhs(torch.empty(0, 64)).shape == (0, 64)
    assert [pattern.item() for pattern, _ in reduced] == [0]


def test_a_cached_weight_asks_when_it_is_quantized_anew(reduced, options, row):
    options("[quantizer]\ncache_weights = true\n[record]\nevery = 1\n")
    PROCESS.begin_step(1)
    spec, amax = QuantSpec("nvfp4"), torch.tensor(1e3)
    for asked in (1, 2):
        for _ in range(2):
            quantized = gemm_operands("fprop", "nvfp4", row).rhs(row)
            assert quantized.equal(fake_quantize(row, spec, amax=amax))
            assert len(reduced) == asked
        with torch.no_grad():
            row.div_(2)
    (measured,) = RECORDER.end_step()
    assert measured.amax == 4 * row.abs().max().item()


def test_two_ranks_quantize_the_shards_of_what_one_process_does(equal_on_two_ranks):
    equal_on_two_ranks("sharded_operands.py")
