"""docs/quantizers/ue5m3.py: the formats, and the amax that is sampled and held."""

import copy
from collections import defaultdict
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from mqo.project import Project
from mqo.quant import QuantSpec, check_quantizer, fake_quantize, quantize_model
from mqo.quant.plugin_file import load_quantizers
from mqo.quant.plugin_source import declared
from mqo.quant.plugins import PLUGINS
from torch import nn

from ..oracles.elements import E2M1, Element, nearest

FILE = Project.here().root / "docs/quantizers/ue5m3.py"
F32 = np.float32
UE5M3 = Element(3, -14, 15, 61440.0)


@pytest.fixture(autouse=True)
def ue5m3():
    load_quantizers(FILE)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cauchy(*shape):
    """The quotient of two normal numbers: a few are 1e5 times as large as most."""
    return normal(*shape) / normal(*shape, seed=1)


# -- the formats, block by block -------------------------------------------------------------------


def by_definition(x, amax, target=448.0, height=1):
    """Float32 [rows, K] -> the rounded numbers, for a sampled amax."""
    rows, size = x.shape
    factor = F32(6 * target) / F32(amax)
    alpha = F32(1) / factor
    result = np.empty_like(x)
    for top, left in product(range(0, rows, height), range(0, size, 16)):
        block = x[top : top + height, left : left + 16]
        largest = max(F32(abs(v)) for v in block.flat)
        scale = F32(nearest(largest * (factor * F32(1 / 6)), UE5M3)) or F32(1)
        inverse = F32(1) / (scale * alpha)
        for row, column in np.ndindex(block.shape):
            element = F32(nearest(block[row, column] * inverse, E2M1))
            result[top + row, left + column] = alpha * (element * scale)
    return result


def data_of(kind):
    """A tensor, and its sampled amax."""
    if kind == "padded":
        x = normal(20, 40)
    elif kind == "heavy tails":
        x = cauchy(16, 128)
    elif kind == "near ties":
        # Float32 decides on which side of a middle a block scale, and then an element, is.
        middles = (UE5M3.grid[80:176] + UE5M3.grid[81:177]) / 2
        elements = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 2
        x = torch.from_numpy(np.outer(middles, elements)).float() * 0.7 / 448
        return x.repeat(1, 3), torch.tensor(6 * 0.7)
    else:
        x = normal(16, 256)
    if kind == "small blocks":
        x *= torch.logspace(-12, 0, 16).unsqueeze(1)  # of UE5M3's subnormals, and rounded to zero
        x[15, 128:] = 0
    stale = 1e-3 if kind == "grown" else 1.0
    return x, stale * x.abs().amax()


@pytest.mark.parametrize("tile", ["row", "square"])
@pytest.mark.parametrize("target", [448.0, 2048.0, 3.7])
@pytest.mark.parametrize(
    "kind", ["normal", "heavy tails", "small blocks", "grown", "padded", "near ties"]
)
def test_it_is_the_definition_bit_for_bit(kind, target, tile):
    x, amax = data_of(kind)
    ours = fake_quantize(x, QuantSpec("ue5m3", tile=tile, options={"target": target}), amax=amax)
    height = 16 if tile == "square" else 1
    expected = by_definition(x.numpy(), amax.item(), target, height)
    assert ours.numpy().view(np.int32).tolist() == expected.view(np.int32).tolist()


def scaled(*scales):
    """Blocks whose scale is `scales` before it is rounded, of one element -> the elements."""
    x = torch.zeros(len(scales), 16)
    x[:, 0] = 6 * torch.tensor(scales)
    return fake_quantize(x, "ue5m3", amax=torch.tensor(448 * 6.0))[:, 0]


def test_a_scale_may_be_any_value_of_ue5m3():
    values = [(8 * (code >= 8) + code % 8) * 2.0 ** (max(code // 8, 1) - 18) for code in range(248)]
    assert (values[1], values[8], values[-1]) == (2.0**-17, 2.0**-14, 61440.0)
    assert sorted(values) == values == UE5M3.grid.tolist()
    assert scaled(*values).tolist() == [6 * value for value in values]


def test_scales_between_two_values_are_rounded_to_even_and_saturate():
    tiny = 2.0**-17
    # Scales 0, 1, 2, 2 and 4 times 2^-17; 4.5 and 3.75 of E2M1 are rounded to 4, 8.4 to 6.
    result = scaled(0.5 * tiny, 0.7 * tiny, 1.5 * tiny, 2.5 * tiny, 3.5 * tiny)
    assert (result / tiny).tolist() == [0, 4, 8, 12, 24]
    assert scaled(1 + 1 / 16, 1 + 3 / 16).tolist() == [6, 6 * 1.25]
    assert scaled(61440 * 1.01, 1e9).tolist() == [6 * 61440] * 2


def test_elements_between_two_values_are_rounded_to_even():
    x = torch.zeros(1, 16)
    x[0, :8] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, -2.5, 3.5, 5.0])
    assert fake_quantize(x, "ue5m3")[0, :8].div(x[0, 0] / 6).round(decimals=4).tolist() == [
        *(6, 0, 1, 1, 2, -2, 4, 4)
    ]


def test_pieces_of_threads_have_the_same_bits():
    x, amax = normal(300, 512), torch.tensor(4.0)
    whole = fake_quantize(x, "ue5m3", amax=amax)
    parts = [fake_quantize(part, "ue5m3", amax=amax) for part in x.split(7)]
    assert whole.equal(torch.cat(parts))


# -- against NVFP4 ---------------------------------------------------------------------------------


def decibels(x, result):
    return (10 * ((x**2).sum() / ((result - x) ** 2).sum()).log10()).item()


def decibels_of_most(x, kind):
    """The SQNR of the 90 % of the blocks that have no large element, whose error would hide it."""
    blocks, rounded = (t.unflatten(1, (-1, 16)) for t in (x, fake_quantize(x, kind)))
    most = blocks.abs().amax(2) < 100
    assert 0.9 < most.float().mean() < 1.0
    return decibels(blocks[most], rounded[most])


def test_it_is_as_good_as_nvfp4_where_e4m3_has_the_range():
    x = normal(256, 512)
    ours, theirs = (decibels(x, fake_quantize(x, kind)) for kind in ("ue5m3", "nvfp4"))
    assert abs(ours - theirs) < 0.05 and 20 < ours < 21


def test_small_blocks_of_heavy_tails_have_less_error_than_those_of_nvfp4():
    x = cauchy(256, 512)
    ours, theirs = (decibels_of_most(x, kind) for kind in ("ue5m3", "nvfp4"))
    assert ours > 20 and ours > theirs + 3


def test_tensors_may_grow_by_100_after_a_sample():
    x = normal(256, 512)
    amax, current = x.abs().amax(), decibels(x, fake_quantize(x, "ue5m3"))
    for growth in (10, 100):
        ours, theirs = (
            decibels(x, fake_quantize(x, kind, amax=amax / growth)) for kind in ("ue5m3", "nvfp4")
        )
        assert abs(ours - current) < 0.1
        assert theirs < 5  # its scales saturate
    assert decibels(x, fake_quantize(x, "ue5m3", amax=amax / 1000)) < current - 10


# -- sample and hold -------------------------------------------------------------------------------


class Model(nn.Module):
    """Two layers, and one that runs from the second step on."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.late = nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 32)

    def forward(self, x, step):
        y = self.down(self.up(x).relu())
        return y if step == 1 else self.late(y)


class Training:
    """A model that trains with a sample in every third step, on data that grow and shrink."""

    def __init__(self, folder):
        torch.manual_seed(0)
        recipe = folder / "own.toml"
        types = ", ".join(f'{site} = "ue5m3"' for site in ("fprop", "dgrad", "wgrad"))
        recipe.write_text(f"types = {{ {types} }}\n[plugin_options.ue5m3]\nevery = 3\n")
        self.model = Model()
        self.quantization = quantize_model(self.model, recipe)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)

    def run(self, steps, micro_batches=1):
        """Train with these steps and return the losses."""
        losses = []
        for step in steps:
            self.quantization.set_step(step - 1)
            for number in range(micro_batches):
                scale = (1.0, 0.2, 3.0, 0.5)[(step + number) % 4]
                x = scale * normal(24, 32, seed=10 * step + number)
                loss = (self.model(x, step) - x).square().mean()
                loss.backward()
                losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def state_dict(self, step):
        self.quantization.set_step(step)
        parts = (self.model, self.optimizer, self.quantization)
        return [copy.deepcopy(part.state_dict()) for part in parts]

    def load_state_dict(self, saved):
        parts = (self.model, self.optimizer, self.quantization)
        for part, state in zip(parts, saved, strict=True):
            part.load_state_dict(state)


@pytest.fixture
def calls():
    """{operand: {step: [(amax of the tensor, factor of the tensor's scale)]}} of all calls."""
    calls = defaultdict(lambda: defaultdict(list))
    plugin = PLUGINS["ue5m3"]

    def listen(x, context):
        values, alpha = plugin.function(x, context)
        key = (context.site, context.layer, context.operand)
        calls[key][context.step + 1].append((x.abs().max().item(), alpha.item()))
        return values, alpha

    PLUGINS["ue5m3"] = replace(plugin, function=listen)
    return calls


def expected_scales(amaxes):
    """{step: amaxes of the micro-batches} -> {step: scales}, by the definition of the paper."""
    scales, held, sampled_at = {}, None, None
    for step, current in sorted(amaxes.items()):
        if sampled_at is None or step - sampled_at >= 3:
            held, sampled_at, chosen = max(current), step, current
        else:
            chosen = [held] * len(current)
        scales[step] = [(F32(1) / (F32(448 * 6) / F32(amax))).item() for amax in chosen]
    return scales, sampled_at


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_each_step_uses_the_amax_of_the_last_sample(calls, tmp_path, micro_batches):
    Training(tmp_path).run(range(1, 9), micro_batches)
    assert len(calls) == 3 * 3 * 2 - 2  # the first layer has no dgrad
    for (_, layer, _), steps in calls.items():
        assert list(steps) == list(range(2 if layer == "late" else 1, 9))
        assert {len(pairs) for pairs in steps.values()} == {micro_batches}
        amaxes = {step: [amax for amax, _ in pairs] for step, pairs in steps.items()}
        assert len({amax for pairs in amaxes.values() for amax in pairs}) > 6
        scales, last = expected_scales(amaxes)
        assert {step: [alpha for _, alpha in pairs] for step, pairs in steps.items()} == scales
        assert last == (8 if layer == "late" else 7)


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_resumed_training_continues_bit_for_bit(tmp_path, cut):
    whole = Training(tmp_path)
    losses = whole.run(range(1, cut + 1))
    saved = whole.state_dict(cut)
    losses += whole.run(range(cut + 1, 9))
    resumed = Training(tmp_path)
    resumed.load_state_dict(saved)
    assert resumed.run(range(cut + 1, 9)) == losses[cut:]
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert ours.equal(theirs)
    assert repr(resumed.quantization.state_dict()) == repr(whole.quantization.state_dict())


def test_without_the_saved_amax_the_losses_differ(tmp_path):
    whole = Training(tmp_path)
    whole.run(range(1, 3))
    saved = whole.state_dict(2)
    resumed = Training(tmp_path)
    resumed.load_state_dict([*saved[:2], {}])
    assert resumed.run([3]) != whole.run([3])


def test_an_evaluation_uses_the_held_amax_and_does_not_sample(calls, tmp_path):
    training = Training(tmp_path)
    training.run([1, 2])
    (_, held), *_ = calls["fprop", "up", "x"][1]
    training.quantization.set_step(2)
    with torch.no_grad():
        training.model.eval()(100 * normal(4, 32), 3)
    training.model.train()
    training.run([3, 4])
    assert [alpha for _, alpha in calls["fprop", "up", "x"][3]] == [held] * 2
    ((amax, sampled),) = calls["fprop", "up", "x"][4]
    assert sampled == F32(1) / (F32(448 * 6) / F32(amax)) != held


@pytest.mark.parametrize("amax", [0.0, torch.inf, torch.nan])
def test_a_sample_of_zero_and_one_that_is_not_finite_are_not_kept(amax):
    old = {"amax": torch.tensor(2.0), "step": torch.tensor(1.0)}
    new = {"amax": torch.tensor(amax), "step": torch.tensor(4.0)}
    update = PLUGINS["ue5m3"].update
    assert update(old, new, 4, {}) is old
    assert update(old, new | {"amax": torch.tensor(3.0)}, 4, {})["amax"] == 3


def test_it_passes_the_check():
    assert check_quantizer("ue5m3").passed


def test_a_run_reads_its_declaration_without_running_it():
    assert declared(FILE) == {"ue5m3": PLUGINS["ue5m3"]}
