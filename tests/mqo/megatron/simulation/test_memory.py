"""Which storages are alive when, and of which kind."""

from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mqo.megatron.simulation.memory import ALIGNMENT, AllocationLog
from mqo.megatron.simulation.rows import KINDS
from mqo.megatron.simulation.unreal import without_data
from mqo.megatron.simulation.watch import Watch
from mqo.quant.packing import pack
from mqo.quant.spec import QuantSpec
from torch.utils.checkpoint import checkpoint

BLOCK = 128  # fp32 elements of 512 bytes


def watched(**options):
    memory = AllocationLog(only_fake=False, **options)
    return memory, Watch(memory)


def alive(memory, watch):
    """Bytes by kind, now."""
    found = memory.between(0, watch.clock)
    return {kind: int(row[-1]) for kind, row in zip(KINDS, found.curves(), strict=True) if row[-1]}


def test_a_storage_counts_once_and_until_its_last_view_is_gone():
    memory, watch = watched()
    with watch:
        x = torch.empty(3 * BLOCK)
        view = x.view(3, -1)[1]
        x.mul_(2)
        assert alive(memory, watch) == {"temporary": 3 * ALIGNMENT}
        del x
        assert alive(memory, watch) == {"temporary": 3 * ALIGNMENT}
        del view
        torch.empty(0)
        assert alive(memory, watch) == {}


def step(memory, function):
    """Run forward and backward of a function of a weight, as a step has it."""
    weight = torch.ones(BLOCK, requires_grad=True)
    memory.phase = "forward"
    function(weight).sum().backward()
    return weight


def test_what_a_backward_pass_finds_is_an_activation():
    memory, watch = watched()
    with watch:
        step(memory, lambda w: (w * 2).exp())
    kinds = [row[3] for row in memory.between(0, memory._clock).rows]
    # The results of exp and sum and the first gradient; exp does not keep w * 2.
    assert kinds.count("activations") == 3
    assert "temporary" in kinds


def test_what_is_recomputed_is_no_activation():
    memory, watch = watched()
    with watch:
        step(memory, lambda w: checkpoint(lambda x: x.exp().exp(), w, use_reentrant=True))
    kept = [row for row in memory.between(0, memory._clock).rows if row[3] == "activations"]
    assert all(row[4].phase == "forward" for row in kept)
    assert any(row[4].phase == "backward" for row in memory.between(0, memory._clock).rows)


def test_a_named_tensor_keeps_its_name():
    memory, watch = watched()
    with watch:
        weight = torch.empty(BLOCK)
        memory.set_kind("weights", [weight, weight.view(2, -1)])
        memory.set_kind("gradients", [weight])
        assert alive(memory, watch) == {"weights": ALIGNMENT}


def test_a_storage_that_is_emptied_and_filled_again():
    memory, watch = watched()
    with memory.watching_sizes(), watch:
        x = torch.empty(4 * BLOCK)
        before = watch.clock
        torch.empty(0)
        x.untyped_storage().resize_(0)
        torch.empty(0)
        assert alive(memory, watch) == {}
        x.untyped_storage().resize_(8 * BLOCK)
        torch.empty(0)
        assert alive(memory, watch) == {"temporary": 2 * ALIGNMENT}
        assert int(memory.between(0, watch.clock).curves()[:, before].sum()) == 4 * ALIGNMENT
    assert torch.UntypedStorage.resize_.__name__ == "resize_"
    del x


def test_only_tensors_without_data_count_in_a_simulation():
    memory = AllocationLog()
    watch = Watch(memory)
    real = torch.ones(BLOCK)
    with without_data(), watch:
        real.view(2, -1)
        fake = torch.empty(2 * BLOCK)
        assert alive(memory, watch) == {"temporary": 2 * ALIGNMENT}
    del fake


@given(st.lists(st.one_of(st.integers(1, 2000), st.none()), max_size=30))
def test_curves_are_the_bytes_alive_at_every_operation(sizes):
    memory, watch = watched()
    kept, counted = [], []
    with watch:
        for size in sizes:
            if size is None:
                kept[:1] = []
                torch.empty(0)  # a clock tick
            else:
                kept.append(torch.empty(size))
            counted.append(sum(-(-4 * t.numel() // ALIGNMENT) * ALIGNMENT for t in kept))
    if sizes:
        found = memory.between(1, watch.clock).curves().sum(axis=0).tolist()
        assert found == counted
        top = max(range(len(counted)), key=counted.__getitem__)
        rows = memory.between(1, watch.clock).by_line(top + 1)
        assert sum(row["bytes"] for row in rows) == counted[top]


@pytest.mark.parametrize("groups", [4, 2])
def test_the_gradient_of_flash_attention_has_a_workspace(groups):
    memory, watch = watched()
    query = torch.zeros(2, 4, 64, 32, requires_grad=True)
    key = torch.zeros(2, groups, 64, 32, requires_grad=True)
    with watch:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, key, is_causal=True, enable_gqa=groups != 4
        )
        out.sum().backward()
    sizes = [one.size for one in memory.log if one.died == one.born + 1]
    assert 4 * query.numel() in sizes


@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4"])
def test_packing_counts_the_copies_that_it_makes_of_all_of_a_tensor(kind):
    module, peaks = import_module("mqo.quant.packing"), []
    for run in (pack, lambda x, spec: module._pack(x, spec, -1, None, None)):
        memory, watch = watched()
        with watch:
            made = run(torch.zeros(8192, 1024, dtype=torch.bfloat16), QuantSpec(kind))
        assert made
        peaks.append(memory.between(0, watch.clock).curves().sum(axis=0).max())
    # Beside the copies a part of the rows is at work.
    assert peaks[0] < peaks[1] < 1.25 * peaks[0]
