"""recipes/ue5m3.py: the formats, and the amax that is sampled and held."""

import copy
from collections import defaultdict
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from mqo.launch.config import resolve
from mqo.project import Project
from mqo.quant import QuantSpec, Recipe, fake_quantize, quantize_model
from mqo.quant.config import parse
from mqo.quant.plugin_file import load_quantizers
from mqo.quant.plugins import PLUGINS
from mqo.quant.stochastic import derive_seed, draws, split_seed
from mqo.recipes import recipe as recipes
from torch import nn

from ..oracles.compared import documented
from ..oracles.elements import E2M1, UE5M3, nearest, stochastic

FILE = Project.here().root / "tools/mqo/quant/recipes/ue5m3.py"
F32 = np.float32


@pytest.fixture(autouse=True)
def ue5m3():
    load_quantizers(FILE)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cauchy(*shape):
    """The quotient of two normal numbers: a few are 1e5 times as large as most."""
    return normal(*shape) / normal(*shape, seed=1)


# -- the formats, block by block -------------------------------------------------------------------


def by_definition(x, amax, target=448.0, height=1, drawn=None):
    """Float32 [rows, K] -> the rounded numbers, for a sampled amax; with numbers if drawn."""
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
            at = top + row, left + column
            number = block[row, column] * inverse
            if drawn is None:
                element = nearest(number, E2M1)
            else:
                element = stochastic(number, E2M1, drawn[at].item())
            result[at] = alpha * (F32(element) * scale)
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
@pytest.mark.parametrize("target", [448.0, 1792.0, 3.5])
@pytest.mark.parametrize(
    "kind", ["normal", "heavy tails", "small blocks", "grown", "padded", "near ties"]
)
def test_it_is_the_definition_bit_for_bit(kind, target, tile):
    x, amax = data_of(kind)
    for name, drawn in (("ue5m3", None), ("ue5m3_stochastic", draws(x.shape, split_seed(5, 1)))):
        if drawn is not None and kind == "padded":
            continue  # numbers are drawn for the padded rows
        spec = QuantSpec(name, tile=tile, options={"target": target})
        ours = fake_quantize(x, spec, amax=amax, seed=5)
        height = 16 if tile == "square" else 1
        expected = by_definition(x.numpy(), amax.item(), target, height, drawn)
        assert same_bits(ours, expected)


def same_bits(ours, expected):
    return ours.numpy().view(np.int32).tolist() == expected.view(np.int32).tolist()


def test_a_target_of_2048_is_the_definition_up_to_the_last_bit_of_the_tensors_scale():
    x, amax = data_of("normal")
    ours = fake_quantize(x, QuantSpec("ue5m3", options={"target": 2048.0}), amax=amax)
    expected = torch.from_numpy(by_definition(x.numpy(), amax.item(), 2048.0))
    torch.testing.assert_close(ours, expected, rtol=2.0**-22, atol=0)


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


# -- the recipe ------------------------------------------------------------------------------------

SIZES = {"x": (24, 32), "weight": (48, 32), "grad": (24, 48)}  # of 16 and no multiples of 64
STEPS = range(1, 5)
# What the GEMMs multiply: an operand, whether its first axis is the one they sum over, and how.
OPERANDS = {
    ("fprop", "x"): (False, 1, False),
    ("fprop", "weight"): (False, 16, False),
    ("dgrad", "grad"): (False, 1, True),
    ("dgrad", "weight"): (True, 16, False),
    ("wgrad", "grad"): (True, 1, True),
    ("wgrad", "x"): (True, 1, False),
}


def tensors_of(step, dtype):
    """x, weight and grad of a step: they grow, and their rows and columns have scales."""
    result = {}
    for seed, (name, shape) in enumerate(SIZES.items(), 1):
        t = 3.0**step * normal(*shape, seed=10 * step + seed)
        result[name] = (t * torch.exp2(torch.arange(shape[1]) % 7 - 3.0)).to(dtype)
    return result


def recipe_run(dtype, monkeypatch):
    """Yield (step, what the quantizers returned, by operand, x.grad and weight.grad, y)."""
    recipe = Recipe.load("ue5m3")
    options = {name: {"every": 3} for name in ("ue5m3", "ue5m3_stochastic")}
    layer = nn.Linear(32, 48, bias=False, dtype=dtype)
    model = nn.Sequential(layer)
    quantization = quantize_model(model, recipe, plugin_options=options)
    seen = {}

    def listen(function):
        def call(x, context):
            values, alpha = function(x, context)
            seen[context.site, context.operand] = values * F32(alpha)
            return values, alpha

        return call

    for name in options:
        plugin = PLUGINS[name]
        monkeypatch.setitem(PLUGINS, name, replace(plugin, function=listen(plugin.function)))
    for step in STEPS:
        quantization.set_step(step - 1)
        given = tensors_of(step, dtype)
        with torch.no_grad():
            model[0].weight.copy_(given["weight"])
        x = given["x"].requires_grad_()
        y = model(x)
        model[0].weight.grad = None
        y.backward(given["grad"])
        yield step, dict(seen), {"fprop": y, "dgrad": x.grad, "wgrad": model[0].weight.grad}
        seen.clear()


def expected_operand(place, step, dtype):
    """The operand of a step by the definition, [rows, K]; the samples are those of steps 1 and 4"""
    transposed, height, is_drawn = OPERANDS[place]
    site, operand = place
    x = tensors_of(step, dtype)[operand].float()
    x = (x.t() if transposed else x).contiguous()
    sampled = tensors_of(4 if step == 4 else 1, dtype)[operand].float().abs().max().item()
    numbers = None
    if is_drawn:
        where = {"site": site, "operand": operand, "layer": "0"}
        seed = derive_seed(0, step=step - 1, micro_batch=0, shard=0, **where)
        rows, size = x.shape
        numbers = draws(torch.Size((rows, size + -size % 16)), split_seed(seed, 1))[:, :size]
    return by_definition(x.numpy(), sampled, height=height, drawn=numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_of_a_layer_are_the_definition_bit_for_bit(dtype, monkeypatch):
    for step, seen, gemms in recipe_run(dtype, monkeypatch):
        assert seen.keys() == OPERANDS.keys()
        expected = {place: expected_operand(place, step, dtype) for place in OPERANDS}
        for place, result in seen.items():
            rows, size = expected[place].shape
            assert same_bits(result[:rows, :size].contiguous(), expected[place]), (step, place)
        for site, gemm in gemms.items():
            lhs, rhs = (array.astype(float) for at, array in expected.items() if at[0] == site)
            error = np.linalg.norm(gemm.detach().double().numpy() - lhs @ rhs.T)
            limit = 1e-6 if dtype == torch.float32 else 2.0**-8
            assert error < limit * np.linalg.norm(lhs @ rhs.T), (step, site)


def test_the_number_of_compared_values_is_the_documented_one():
    values = sum(np.prod(SIZES[operand]) for _, operand in OPERANDS)
    assert documented("ue5m3") == 2 * len(STEPS) * values


OVERRIDE = """
[[rules]]
last = 4
parts = ["fc2"]
recipe = "down"
[recipes.down]
types = { fprop = "ue5m3", dgrad = "ue5m3", wgrad = "ue5m3" }
[recipes.down.operands]
"fprop.weight" = { tile = "square" }
"dgrad.grad" = { quant_type = "ue5m3_stochastic" }
"dgrad.weight" = { tile = "square" }
"wgrad.grad" = { quant_type = "ue5m3_stochastic", options = { target = 2048.0 } }
"""


def test_a_rule_gives_gradients_of_some_layers_the_target_that_the_authors_chose(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(FILE.with_suffix(".toml").read_text() + OVERRIDE)
    flags = {"recipe": recipes.read(str(path)), "extra_flags": ("--num-layers", "8")}
    run = resolve("llama32-1b", "wikipedia", "bf16", "tiny", **flags)
    options = parse(run.quant_toml(run.quantization.types))
    targets = {}
    for block, part, site in product((3, 4), ("fc1", "fc2"), ("dgrad", "wgrad")):
        layer = f"decoder.layers.{block}.mlp.linear_{part}"
        spec = options.operand_spec(site, "grad", layer, "ue5m3").spec
        assert spec.quant_type == "ue5m3_stochastic"
        targets[block, part, site] = dict(spec.options)["target"]
    assert {key for key, target in targets.items() if target == 2048} == {(4, "fc2", "wgrad")}


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
        calls[key][context.step + 1].append((x.abs().max().item(), alpha))
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


def test_gradients_are_unbiased_where_nothing_saturates():
    x = torch.rand(4, 64, generator=torch.Generator().manual_seed(0)) - 0.5
    x[:, ::16] = 1.0  # the amax, whose block scale, 448, is a value of UE5M3
    seeds = range(1000)
    results = torch.stack([fake_quantize(x, "ue5m3_stochastic", seed=seed) for seed in seeds])
    z = (results.mean(0) - x) / (results.std(0) / len(seeds) ** 0.5).clamp(min=1e-6)
    assert z.abs().max() < 5 and results.std(0).max() > 0.05
