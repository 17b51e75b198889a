"""recipes/quest.py and quest.toml: the grids, and the layer of the authors' code."""

import math
from collections import OrderedDict
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mqo.project import Project
from mqo.quant import (
    QuantizerError,
    QuantSpec,
    fake_quantize,
    quantize_model,
    sqnr,
)
from mqo.quant.plugin_file import load_quantizers
from mqo.quant.plugins import PLUGINS
from mqo.quant.recipe import Recipe
from torch import nn
from torch.nn import functional

from ..oracles.compared import documented
from ..oracles.hadamard import sylvester
from .training import losses_of

FOLDER = Project.here().root / "tools/mqo/quant/recipes"
FILE, RECIPE = FOLDER / "quest.py", FOLDER / "quest.toml"
F32 = np.float32
# The authors' numbers, from src/models/quantization/base_linear.py.
CLIPS = [
    *(0.7978845587140913, 1.4935346200015913, 2.051068354131873, 2.513930578568423),
    *(2.9160938834961225, 3.276597282593217, 3.6010497188221655, 3.884938678807525),
]
EDGE = 1.3  # of the gradients in the authors' 1-bit runs, times the clip
BITS = range(1, 9)


@pytest.fixture(autouse=True)
def quest():
    load_quantizers(FILE)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spec(**options):
    return QuantSpec("quest", options=options)


# -- the clips -------------------------------------------------------------------------------------


def moments(clip, count):
    """E[x·u] and E[u²] of a number x from N(0, 1) that is rounded to clip·u.

    The values clip·u are `count`, at equal distances from -clip to clip.
    """
    units = [2 * i / (count - 1) - 1 for i in range(count)]
    middles = [clip * (a + b) / 2 for a, b in pairwise(units)]
    edges = [-math.inf, *middles, math.inf]
    below = [(1 + math.erf(edge / 2**0.5)) / 2 for edge in edges]
    density = [math.exp(-edge * edge / 2) / math.tau**0.5 for edge in edges]
    return (
        math.fsum(u * (density[i] - density[i + 1]) for i, u in enumerate(units)),
        math.fsum(u * u * (below[i + 1] - below[i]) for i, u in enumerate(units)),
    )


def squared_error(clip, count):
    with_x, squares = moments(clip, count)
    return 1 - 2 * clip * with_x + clip**2 * squares


def best_clip(count):
    """The clip with the smallest squared error, whose derivative is 0: E[x·u] = clip·E[u²]."""
    low, high = 0.5, 5.0
    for _ in range(50):
        middle = (low + high) / 2
        with_x, squares = moments(middle, count)
        low, high = (middle, high) if with_x > middle * squares else (low, middle)
    return low


@pytest.mark.parametrize("bits", BITS)
def test_the_clip_has_the_smallest_squared_error_of_a_gaussian(bits):
    clip, best = CLIPS[bits - 1], best_clip(2**bits)
    if bits <= 5:
        assert clip == pytest.approx(best, rel=4e-5)
    # Of 6 to 8 bits, the authors' numbers are smaller than the best, which matters little.
    assert squared_error(clip, 2**bits) < 1.002 * squared_error(best, 2**bits)


def test_the_error_for_a_gaussian_is_that_of_the_clip():
    x = normal(512, 4096)
    for bits in BITS:
        error = 10 ** (-sqnr(x, spec(bits=bits)) / 10)
        assert error == pytest.approx(squared_error(CLIPS[bits - 1], 2**bits), rel=0.02)


# -- the grid, number by number --------------------------------------------------------------------


def by_definition(x, bits):
    """Float32 [rows, K] -> the nearest value of each row's grid."""
    count, result = 2**bits, np.zeros_like(x)
    for row, numbers in enumerate(x):
        rms = math.sqrt(math.fsum(float(v) ** 2 for v in numbers) / len(numbers))
        step = F32(2 * CLIPS[bits - 1] * rms / (count - 1))
        grid = [F32(i + 0.5 - count / 2) * step for i in range(count)]
        assert len({float(v) for v in grid}) == (count if step else 1)
        exact = np.array(grid, np.float64)
        for column, number in enumerate(numbers):
            if step:
                result[row, column] = grid[np.abs(exact - float(number)).argmin()]
    return result


def data_of(kind):
    """Rows of a distribution."""
    if kind == "short":
        return normal(6, 7)
    if kind == "one column":
        return torch.tensor([[1.5], [-1.0], [0.0]])
    if kind == "zeros":
        x = normal(8, 40)
        x[2] = 0
        x[5, ::3] = 0  # in the middle between two values
        x[6], x[6, 7] = 0, -3.0
        return x
    if kind == "outliers":
        x = normal(20, 256)
        x[:, ::64] *= 50
        return x
    if kind == "scales":
        return normal(9, 40) * 10.0 ** torch.linspace(-36, 30, 9).unsqueeze(1)
    if kind == "heavy tails":
        return normal(16, 128) / normal(16, 128, seed=1)
    return normal(180, 256)  # of several pieces


KINDS = ("normal", "short", "one column", "zeros", "outliers", "scales", "heavy tails")


def test_the_number_of_compared_values_is_the_documented_one():
    assert documented("quest") == len(BITS) * sum(data_of(kind).numel() for kind in KINDS)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_definition_bit_for_bit(kind, bits):
    x = data_of(kind)
    ours = fake_quantize(x, spec(bits=bits))
    expected = by_definition(x.numpy(), bits)
    assert ours.numpy().view(np.int32).tolist() == expected.view(np.int32).tolist()


def test_4_bits_are_the_default():
    x = normal(8, 64)
    assert fake_quantize(x, "quest").equal(fake_quantize(x, spec(bits=4)))


def test_a_number_on_an_axis_that_is_not_the_last_is_rounded_with_its_column():
    x = normal(3, 32, 5)
    ours = fake_quantize(x, "quest", axis=1)
    assert ours.equal(fake_quantize(x.movedim(1, -1), "quest").movedim(-1, 1))


def test_a_row_with_a_number_that_is_not_finite_is_not_finite():
    x = normal(4, 32)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    result = fake_quantize(x, "quest")
    assert not result[1:3].isfinite().any()
    assert result[[0, 3]].equal(fake_quantize(x[[0, 3]], "quest"))


@pytest.mark.parametrize("bits", [0, 9, 16])
def test_other_numbers_of_bits_are_refused(bits):
    with pytest.raises(QuantizerError, match=f"bits = {bits}; valid: 1 to 8"):
        fake_quantize(normal(2, 8), spec(bits=bits))


# -- the mask --------------------------------------------------------------------------------------


def passes(x, **options):
    """Which gradients pass, each multiplied by its index plus 1 to tell it from the others."""
    grad = 1 + torch.arange(x.numel()).reshape(x.shape).float()
    context = SimpleNamespace(options=PLUGINS["quest"].with_defaults(options))
    result = PLUGINS["quest"].estimate(grad, x, context)
    assert ((result == grad) | (result == 0)).all()
    return result != 0


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", ["normal", "short", "outliers", "scales", "heavy tails"])
def test_a_gradient_passes_if_the_error_is_at_most_half_a_step(kind, bits):
    x = data_of(kind)
    error = np.abs(by_definition(x.numpy(), bits).astype(np.float64) - x.numpy())
    rms = np.sqrt((x.double().numpy() ** 2).mean(1, keepdims=True))
    trusted = error <= CLIPS[bits - 1] / (2**bits - 1) * rms
    assert passes(x, bits=bits).tolist() == trusted.tolist()


def test_some_gradients_pass_and_some_do_not():
    share = 1 - passes(normal(512, 4096)).double().mean().item()
    assert share == pytest.approx(math.erfc(CLIPS[3] * 16 / 15 / 2**0.5), rel=0.02)


@pytest.mark.parametrize(("bits", "trust"), [(1, 0.3), (1, 0.0), (4, 0.0), (4, 0.5), (2, 4.0)])
def test_trust_counts_half_steps_beyond_the_outermost_value(bits, trust):
    x = normal(64, 256)
    rms = x.double().square().mean(1, keepdim=True).sqrt()
    edge = CLIPS[bits - 1] * (1 + trust / (2**bits - 1)) * rms
    mask = passes(x, bits=bits, trust=trust)
    assert mask.equal(x.abs() <= edge) and not mask.all()


def test_gradients_of_zeros_pass():
    assert passes(data_of("zeros"))[[2, 5]].any(1).all()
    x = normal(40, 64)
    x[:, ::2], x[7] = 0, 0
    for bits in BITS:
        assert passes(x, bits=bits)[x == 0].all()


# -- a layer, against the authors' -----------------------------------------------------------------


def hadamard(size):
    """The block-diagonal matrix for a K."""
    return torch.block_diag(*[torch.from_numpy(sylvester(128)) / 128**0.5] * (size // 128))


def straight_through(turned, bits):
    """The authors' quantizer of rows that are multiplied by the Hadamard matrix, in float64."""
    turned = turned.double()
    with torch.no_grad():
        count, clip = 2**bits, CLIPS[bits - 1]
        std = turned.square().mean(-1, keepdim=True).sqrt()
        bound = clip * std + 1e-8
        step = 2 * bound / (count - 1)
        rounded = (turned.clamp(-bound, bound) / step + 0.5).round() * step - step / 2
        if bits == 1:
            mask = turned.abs() <= EDGE * bound
        else:
            mask = (rounded - turned).abs() <= clip / (count - 1) * std
    assert mask.any() and not mask.all()
    passing = turned * mask
    return passing + (rounded - passing).detach()


class Reference(nn.Linear):
    """The authors' layer, with gradients by autograd.

    `dtype` is that of transformed tensors, and of the gradients of rounded ones.
    """

    bits, dtype = 4, torch.float64

    def forward(self, x):
        matrix = hadamard(x.shape[-1])
        x, weight = (
            straight_through((t @ matrix).to(self.dtype), self.bits) for t in (x, self.weight)
        )
        y = functional.linear(x, weight)
        return y + self.bias


def results(model, x, grad):
    """The output and all gradients."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(grad)
    weight, bias = model.parameters()
    return {"y": y.detach(), "dX": x.grad, "dW": weight.grad, "db": bias.grad}


def layer_and_reference(size, bits):
    """A layer with the recipe, and the authors' in float64, with the same parameters."""
    torch.manual_seed(0)
    layer = nn.Linear(size, 96)
    with torch.no_grad():
        layer.weight[3:5] += 0.3  # the transform gathers it in one element of 128
    reference = Reference(size, 96).double()
    reference.load_state_dict(layer.state_dict())
    reference.bits = bits
    options = {"bits": bits, "trust": 0.3} if bits == 1 else {"bits": bits}
    model = nn.Sequential(layer)
    quantize_model(model, Recipe.load(RECIPE), plugin_options={"quest": options})
    return model, reference


def tensors(size):
    """An input [3, 16, K], with outliers and rows of several scales, and a gradient."""
    x = normal(3, 16, size, seed=1)
    x[..., ::37] *= 20
    x[:, :4] *= torch.logspace(-1, 3, 4).unsqueeze(1)
    x[:, 5] = 1 + 0.3 * x[:, 6]
    return x, normal(3, 16, 96, seed=2)


@pytest.mark.parametrize("size", [128, 384])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_a_layer_has_the_output_and_the_gradients_of_the_authors_layer(bits, size):
    model, reference = layer_and_reference(size, bits)
    x, grad = tensors(size)
    ours = results(model, x, grad)
    expected = results(reference, x.double(), grad.double())
    for name, tensor in expected.items():
        # Of sums of at most 384 products in float32, and relative to the largest in each row. With
        # one element that is rounded to another value, or whose gradient is dropped, the rows that
        # depend on it would differ by more than 1e-5.
        error = (ours[name] - tensor).abs() / tensor.abs().amax(-1, keepdim=True)
        assert error.max() < 2e-6, name


def test_a_size_whose_gradient_would_be_cut_is_refused():
    model = nn.Sequential(nn.Linear(200, 96))
    quantize_model(model, Recipe.load(RECIPE))
    with pytest.raises(QuantizerError, match="has 200 elements"):
        model(normal(4, 200)).sum().backward()


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_a_layer_in_bfloat16_has_the_authors_gradients_apart_from_rounding(bits):
    model, reference = layer_and_reference(384, bits)
    model.bfloat16()
    reference.load_state_dict(model[0].state_dict())
    reference.dtype = torch.bfloat16
    x, grad = (t.bfloat16() for t in tensors(384))
    ours = results(model, x, grad)
    for name, tensor in results(reference, x.double(), grad.double()).items():
        # Both round the transforms to bfloat16, from float32 and from float64: few of the results
        # differ, and then an element may have another value, or another gradient.
        error = (ours[name] - tensor).norm() / tensor.norm()
        assert ours[name].dtype == torch.bfloat16 and error < 0.03


def test_a_model_trains_with_the_recipe():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    quantize_model(model, RECIPE)
    losses = losses_of(model, normal(64, 128), 30, lr=1e-3)
    assert losses[-1] < 0.5 * losses[0]


def test_the_head_stays_unquantized():
    model = nn.Sequential(OrderedDict(up=nn.Linear(128, 128), lm_head=nn.Linear(128, 64)))
    assert quantize_model(model, RECIPE).layers == ("up",)
