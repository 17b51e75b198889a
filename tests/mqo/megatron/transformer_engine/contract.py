"""Transformer Engine's real Python code and our factory: run by test_releases.py, in a process.

MQO_TEST_ENGINE says which release.
"""

import copy
import importlib
import inspect
import io
import os
import pickle
import runpy
from argparse import Namespace

import pytest
import torch
import world
from mqo.megatron.coverage import site_coverage
from mqo.megatron.layers import find_layers, label_layers
from mqo.megatron.run.engine_states import StateReader, protect_states
from mqo.megatron.run.setup import Usage
from mqo.megatron.run.unpickle import CheckpointError, check_pickle
from mqo.megatron.transformer_engine.factory import quantizer
from mqo.megatron.transformer_engine.passes import attach
from mqo.megatron.transformer_engine.releases import FACTORY, EngineError, multiplies_plain_tensors
from mqo.quant import weights
from mqo.quant.backend import fake_quantize
from mqo.quant.config import parse
from mqo.quant.gemms import QuantizedOperands
from mqo.quant.linear import QuantLinear
from mqo.quant.products import Alphas
from mqo.quant.progress import set_step
from mqo.quant.quantization import ModelQuantization
from mqo.quant.record import RECORDER
from mqo.quant.spec import QuantSpec
from transformer_engine.common.recipe import CustomRecipe, DelayedScaling

from ....get_packages import ROOT
from .installed import VERSION, te
from .models import (
    DENSE,
    EXPERTS,
    LATENT,
    LINEAR,
    TALL,
    TOKENS,
    WIDE,
    Seen,
    all_gemms,
    assert_same_operands,
    build,
    give_weights,
    options,
    train,
)

PLAIN = multiplies_plain_tensors(VERSION)
EXACT = 1e-5
only_plain = pytest.mark.skipif(
    "not PLAIN", reason="refused before 2.19: its GEMM of custom tensors knows no bias and groups"
)
FOLDER = "transformer_engine.pytorch.custom_recipes"
# Where each release has its reference of NVFP4, and the names of formats.
REFERENCES = {
    "reference_nvfp4": "reference_utils",
    "quantization_ref_nvfp4": "utils",
    "quantization_nvfp4": "utils",
}


@pytest.fixture(autouse=True)
def groups(one_rank):
    with world.groups():
        yield


def both(tmp_path, text, sizes=DENSE, **more):
    """(losses, operands) of the local layers, and of the engine's."""
    options(tmp_path, text)
    local = build(False, sizes, **more)
    engines = give_weights(build(True, sizes, **more), local)
    of_local = train(local)
    options(tmp_path, text)
    return of_local, train(engines)


@pytest.mark.parametrize("quant_type", ["mxfp8", "nvfp4", "hif4", "fp8_tensor"])
def test_a_model_trains_as_its_local_layers_do(tmp_path, quant_type):
    (losses, theirs), (ours, operands) = both(tmp_path, all_gemms(quant_type))
    assert len(operands) == 6 * (2 * 4 + 1)  # the output layer is a local one
    assert_same_operands(operands, theirs)
    assert ours == pytest.approx(losses, abs=EXACT)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_a_recipe_draws_and_transforms_as_local_layers_do(tmp_path, name):
    """Stochastic gradients, random signs, squares: what a recipe has of each operand."""
    rows = """
[operands]
"wgrad.grad" = { rounding = "stochastic", hadamard = 16, signs = "random" }
"wgrad.x" = { hadamard = 16, signs = "random" }
"dgrad.grad" = { rounding = "stochastic" }
"""
    (losses, theirs), (ours, operands) = both(tmp_path, all_gemms(name, rows))
    assert_same_operands(operands, theirs)
    assert ours == pytest.approx(losses, abs=EXACT)


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    ],
)
def test_a_pass_that_is_recomputed_draws_as_the_first(tmp_path, recompute):
    rows = '[operands]\n"wgrad.x" = { rounding = "stochastic" }'
    text = all_gemms("mxfp4", rows)
    options(tmp_path, text)
    kept = build(True)
    losses, operands = train(kept)
    options(tmp_path, text)
    again, recomputed = train(build(True, **recompute))
    assert again == losses
    for place, pairs in operands.items():
        _, last = pairs[-1]
        _, found = recomputed[place][-1]
        assert torch.equal(found, last), place


def test_unquantized_sites_and_excluded_layers_pass_through(tmp_path):
    text = '[schedule]\nfprop = "mxfp8"\n[layers]\nexclude = ["decoder.layers.0.*"]\n'
    (losses, theirs), (ours, operands) = both(tmp_path, text + "[quantizer]\ncache_weights = true")
    assert {(site, layer.split(".")[2]) for site, layer, _ in operands if "decoder" in layer} == {
        ("fprop", "1")
    }
    assert_same_operands(operands, theirs)
    assert ours == pytest.approx(losses, abs=EXACT)


@pytest.mark.parametrize("sizes", [EXPERTS, LATENT], ids=["experts", "latent attention"])
def test_other_architectures_train_as_their_local_layers_do(tmp_path, sizes):
    (losses, theirs), (ours, operands) = both(tmp_path, all_gemms("nvfp4"), sizes)
    assert_same_operands(operands, theirs)
    assert ours == pytest.approx(losses, abs=EXACT)


@only_plain
def test_grouped_experts_have_the_operands_of_experts_one_by_one(tmp_path):
    options(tmp_path, all_gemms("mxfp8"))
    local = build(False, EXPERTS)
    grouped = give_weights(build(True, EXPERTS, moe_grouped_gemm=True), local)
    losses, theirs = train(local)
    options(tmp_path, all_gemms("mxfp8"))
    ours, found = train(grouped)
    assert any("local_experts.3.linear_fc1" in layer for _, layer, _ in found)
    assert_same_operands(found, theirs)
    assert ours == pytest.approx(losses, abs=EXACT)


# -- the engine's layers alone -----------------------------------------------------------------


def layer(kind, **more):
    """A layer of the engine's own, in a model that is named for the quantizers."""
    torch.manual_seed(3)
    chosen = {"params_dtype": torch.float32, "device": "cpu", **more}
    chosen |= {} if kind in ("Linear", "GroupedLinear") else {"normalization": "RMSNorm"}
    sizes = (4, WIDE, TALL) if kind == "GroupedLinear" else (WIDE, TALL)
    made = getattr(te, kind)(*sizes, **chosen)
    model = torch.nn.ModuleDict({"layer": made})
    label_layers(model)
    attach(model)
    return made


def run(made, x, *more, **named):
    """The layer's output; quantized if there is a factory."""
    with te.fp8_autocast(enabled=True, fp8_recipe=CustomRecipe(qfactory=quantizer)):
        return made(x, *more, **named)


def inputs(seed=5, tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, WIDE, generator=generator).requires_grad_()


def operands(x, weight, grad, quant_type="mxfp8"):
    """The six operands of a linear layer, as the formats' definition has them."""
    spec = QuantSpec(quant_type)
    row = [fake_quantize(t.detach(), spec, axis=-1) for t in (x, weight, grad)]
    column = [fake_quantize(t.detach(), spec, axis=0) for t in (x, weight, grad)]
    return row, column


@pytest.mark.parametrize("quant_type", ["mxfp4", "nvfp4"])
def test_in_float32_it_is_quant_linear(tmp_path, monkeypatch, quant_type):
    """tests/mqo/quant/test_linear.py compares that with Megatron's layer."""
    text = all_gemms(
        quant_type,
        """
[operands]
"dgrad.grad" = { rounding = "stochastic" }
"wgrad.grad" = { rounding = "stochastic", hadamard = 16, signs = "random" }
"wgrad.x" = { hadamard = 16, signs = "random" }
"""
        + ('"fprop.weight" = { tile = "square" }' if quant_type == "nvfp4" else ""),
    )
    options(tmp_path, text)
    # The engine's operands include alpha.
    monkeypatch.setattr(QuantizedOperands, "separate_alphas", lambda self: Alphas())
    made, (x, ours) = layer("Linear", bias=False), (inputs(), inputs())
    shared = ModelQuantization(parse(text))
    linear = QuantLinear(WIDE, TALL, bias=False, quantization=shared, name="layer")
    linear.load_state_dict({"weight": made.weight.detach()})
    grad = torch.randn(TOKENS, TALL, generator=torch.Generator().manual_seed(6))
    y, y_ours = run(made, x), linear(ours)
    y.backward(grad)
    y_ours.backward(grad)
    assert torch.equal(y, y_ours)
    assert torch.equal(x.grad, ours.grad)
    assert torch.equal(made.weight.grad, linear.weight.grad)


@pytest.mark.parametrize("bias", [False, pytest.param(True, marks=only_plain)])
def test_a_linear_layer_is_the_product_of_its_operands(tmp_path, bias):
    options(tmp_path, all_gemms("mxfp8"))
    made, x = layer("Linear", bias=bias), inputs()
    y = run(made, x)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(6))
    y.backward(grad)
    (x_row, w_row, g_row), (x_column, w_column, g_column) = operands(x, made.weight, grad)
    of_bias = made.bias if bias else 0.0
    assert torch.equal(y, x_row.matmul(w_row.t()) + of_bias)
    assert torch.equal(x.grad, g_row.matmul(w_column))
    assert torch.equal(made.weight.grad, g_column.t().matmul(x_column))
    if bias:
        assert torch.equal(made.bias.grad, grad.sum(0))


def test_a_norm_before_a_layer_is_not_quantized(tmp_path):
    options(tmp_path, all_gemms("mxfp8"))
    made, x = layer("LayerNormLinear", bias=False), inputs()
    y = run(made, x)
    normed = torch.nn.functional.rms_norm(x, (WIDE,), made.layer_norm_weight, 1e-5)
    grad = torch.ones_like(y)
    y.backward(grad)
    (x_row, w_row, _), (x_column, _, g_column) = operands(normed, made.weight, grad)
    assert torch.equal(y, x_row.matmul(w_row.t()))
    assert torch.equal(made.weight.grad, g_column.t().matmul(x_column))


@only_plain
def test_two_layers_in_one_module_have_names_of_their_own(tmp_path):
    options(tmp_path, all_gemms("mxfp8"))
    made, x = layer("LayerNormMLP", bias=False, activation="swiglu"), inputs()
    seen = Seen()
    run(made, x).sum().backward()
    found = seen.close()
    assert {name for _, name, _ in found} == {"layer.fc1", "layer.fc2"}
    assert len(found) == 12
    [(x, x_row)] = found["fprop", "layer.fc1", "x"]
    assert torch.equal(x_row, fake_quantize(x, QuantSpec("mxfp8")))
    for (_, name, operand), [(given, _)] in found.items():
        if operand == "weight":
            own = made.fc1_weight if name.endswith("fc1") else made.fc2_weight
            assert torch.equal(given, own)


@only_plain
def test_grouped_layers_are_experts_one_by_one(tmp_path):
    options(tmp_path, all_gemms("nvfp4"))
    made, x = layer("GroupedLinear", bias=False), inputs()
    splits = [8, 0, 16, 8]
    y = run(made, x, splits)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(6))
    y.backward(grad)
    for i, (one, of_y) in enumerate(zip(x.split(splits), grad.split(splits), strict=True)):
        weight = getattr(made, f"weight{i}")
        (x_row, w_row, g_row), (x_column, w_column, g_column) = operands(one, weight, of_y, "nvfp4")
        assert torch.equal(y.split(splits)[i], x_row.matmul(w_row.t()))
        assert torch.equal(x.grad.split(splits)[i], g_row.matmul(w_column))
        assert torch.equal(weight.grad, g_column.t().matmul(x_column))


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=only_plain)])
def test_two_micro_batches_add_up_in_main_grad(tmp_path, fused):
    """Where the layer says that it added to main_grad, it did."""
    options(tmp_path, all_gemms("mxfp8"))
    made = layer("Linear", bias=False, fuse_wgrad_accumulation=fused)
    made.weight.main_grad = torch.zeros(TALL, WIDE)
    made.weight.grad_added_to_main_grad = False
    expected = torch.zeros(TALL, WIDE)
    for number in range(2):
        x = inputs(seed=number)
        y = run(made, x, is_first_microbatch=None)
        y.backward(torch.ones_like(y))
        _, (x_column, _, g_column) = operands(x, made.weight, torch.ones_like(y))
        expected += g_column.t().matmul(x_column)
    assert made.weight.grad_added_to_main_grad == fused
    if not fused:
        made.weight.main_grad += made.weight.grad  # as upstream's hook does
    assert torch.equal(made.weight.main_grad, expected)


def test_a_weight_is_quantized_once_a_step(tmp_path):
    options(tmp_path, all_gemms("mxfp8"))
    made, seen = layer("Linear", bias=False), Seen()
    for number in range(3):
        run(made, inputs(number), is_first_microbatch=number == 0).sum().backward()
    found = seen.close()
    counts = {place[::2]: len(pairs) for place, pairs in found.items()}
    assert counts["fprop", "weight"] == counts["dgrad", "weight"] == 1
    assert counts["fprop", "x"] == counts["wgrad", "grad"] == 3


def test_no_weight_of_the_step_before_is_multiplied(tmp_path):
    """A pass without gradients brings one half of what is kept up to date: the other one goes."""
    options(tmp_path, all_gemms("mxfp8"))
    made, x = layer("Linear", bias=False), inputs()
    run(made, x, is_first_microbatch=True).sum().backward()
    made.weight.data.mul_(3.0)
    set_step(1)
    weights.weights_changed()
    x.grad = None
    with torch.no_grad():
        run(made, x, is_first_microbatch=True)
    y = run(made, x, is_first_microbatch=False)
    y.backward(torch.ones_like(y))
    (x_row, w_row, g_row), (_, w_column, _) = operands(x, made.weight, torch.ones_like(y))
    assert torch.equal(y, x_row.matmul(w_row.t()))
    assert torch.equal(x.grad, g_row.matmul(w_column))


@pytest.mark.skipif("PLAIN", reason="2.19 and newer multiply all of these")
@pytest.mark.parametrize(
    ("kind", "more", "text"),
    [
        ("Linear", {"bias": True}, "a bias"),
        ("Linear", {"bias": False, "fuse_wgrad_accumulation": True}, "would be lost"),
        ("LayerNormMLP", {"bias": False}, "several GEMMs"),
        ("GroupedLinear", {"bias": False}, "several GEMMs"),
    ],
)
def test_what_an_older_release_would_leave_out_is_refused(tmp_path, kind, more, text):
    options(tmp_path, all_gemms("mxfp8"))
    made = layer(kind, **more)
    splits = ([TOKENS, 0, 0, 0],) if kind == "GroupedLinear" else ()
    with pytest.raises(EngineError, match=text):
        run(made, inputs(), *splits)


def test_attention_asks_and_nothing_of_it_is_quantized(tmp_path):
    options(tmp_path, all_gemms("mxfp8"))
    attention = te.DotProductAttention(4, 16)
    attach(torch.nn.ModuleDict({"attention": attention}))
    attention.forward = lambda: attention.init_fp8_metadata(num_gemms=3)
    with te.fp8_autocast(enabled=True, fp8_recipe=CustomRecipe(qfactory=quantizer)):
        attention()
    asked = attention.quantizers.get("scaling_fwd", ())
    assert not any(hasattr(one, "rowwise_quantizer") for one in asked)


def test_a_copied_layer_has_its_own_weights(tmp_path):
    options(tmp_path, all_gemms("mxfp8"))
    made, x = layer("Linear", bias=False), inputs()
    first = run(made, x)
    other = copy.deepcopy(made)
    other.weight.data.mul_(2.0)
    assert torch.equal(run(other, x), 2 * first)
    assert torch.equal(run(made, x), first)


def test_a_layer_without_a_name_is_refused(tmp_path):
    options(tmp_path, all_gemms("mxfp8"))
    made = te.Linear(WIDE, TALL, bias=False, params_dtype=torch.float32, device="cpu")
    with pytest.raises(EngineError, match="label_layers"):
        run(made, inputs())


def test_an_unknown_release_is_refused(tmp_path, monkeypatch):
    options(tmp_path, all_gemms("mxfp8"))
    made = layer("Linear", bias=False)
    monkeypatch.setattr("transformer_engine.__version__", "9.9")
    with pytest.raises(EngineError, match=r" 9\.9 .* 2\.10 "):
        run(made, inputs())


# -- the engine's own reference ----------------------------------------------------------------


@pytest.fixture
def reference():
    """The release's module with a quantizer of NVFP4 in plain torch."""
    name = next(n for n in REFERENCES if importlib.util.find_spec(f"{FOLDER}.{n}"))
    return importlib.import_module(f"{FOLDER}.{name}")


@pytest.mark.parametrize("tile", ["row", "square"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_nvfp4_is_the_engines_reference(reference, tile, dtype):
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(64, 96, generator=generator) * torch.logspace(-2, 2, 64)[:, None]
    x = x.to(dtype)
    shape = (16, 16) if tile == "square" else (1, 16)
    formats = importlib.import_module(f"{FOLDER}.{REFERENCES[reference.__name__.split('.')[-1]]}")
    theirs = reference.NVFP4QuantizerRef(formats.Fp4Formats.E2M1, quant_tile_shape=shape)
    quantized = theirs.quantize(x)
    codes = reference.cast_from_fp4x2(quantized.data, torch.float32)
    scales = quantized.scale.to(torch.float32).repeat_interleave(16, dim=1)
    whole = 1 / torch.div(torch.tensor(2688.0), quantized.global_amax_row)
    expected = codes * (scales[: len(codes), : codes.shape[1]] * whole)
    ours = fake_quantize(x.float(), QuantSpec("nvfp4", tile=tile))
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("tile", ["row", "square"])
def test_our_four_over_six_is_the_engines_reference(reference, tile):
    """In all but a few blocks, whose two errors are nearly equal."""
    arguments = inspect.signature(reference.NVFP4QuantizerRef).parameters
    if "nvfp4_use_4over6" not in arguments:
        pytest.skip(f"Transformer Engine {VERSION} has no reference of four over six")
    runpy.run_path(str(ROOT / "tools/mqo/quant/recipes/four_over_six.py"))
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(8))
    x *= torch.logspace(-2, 2, 256)[:, None]
    formats = importlib.import_module(f"{FOLDER}.{REFERENCES[reference.__name__.split('.')[-1]]}")
    theirs = reference.NVFP4QuantizerRef(
        formats.Fp4Formats.E2M1,
        quant_tile_shape=(16, 16) if tile == "square" else (1, 16),
        nvfp4_use_4over6=True,
        nvfp4_e4m3_max=256,
    )
    quantized = theirs.quantize(x)
    codes = reference.cast_from_fp4x2(quantized.data, torch.float32)
    scales = quantized.scale.to(torch.float32).repeat_interleave(16, dim=1)
    expected = codes * scales[: len(codes), : codes.shape[1]] * (x.abs().max() / (6 * 256))
    ours = fake_quantize(x, QuantSpec("four_over_six", tile=tile))
    close = torch.isclose(ours, expected, rtol=1e-6, atol=0)
    assert close.unflatten(1, (-1, 16)).all(-1).float().mean() > 0.999


# -- what a run makes of it --------------------------------------------------------------------


def test_a_layer_that_did_not_ask_ends_the_run(tmp_path):
    """Upstream leaves these layers out of the engine's quantization, though the run names them."""
    text = all_gemms("mxfp8") + "[asked]\n" + "".join(f'{s} = "mxfp8"\n' for s in LINEAR)
    options(tmp_path, text)
    model = build(True, first_last_layers_bf16=True, num_layers_at_end_in_bf16=0)
    layers = find_layers(model)
    usage = Usage(layers, {"linear"})
    train(model, steps=1)
    asked = dict.fromkeys(LINEAR, "mxfp8")
    labels = [one.layer for one in layers]
    found = site_coverage(asked, labels, usage.close(), RECORDER.entries())
    missed = {(site, layer.split(".")[2]) for site, layer in found.missed}
    assert missed == {(site, "0") for site in LINEAR}
    assert not found.idle and not found.unlabeled


def test_nothing_of_a_quantizer_is_saved_and_nothing_is_read(tmp_path):
    """Its state would name the factory, which the engine then asks before any layer runs."""
    options(tmp_path, all_gemms("mxfp8"))
    made, x = layer("Linear", bias=False), inputs()
    protect_states(made, Namespace(fp8_quantizer_factory=FACTORY))
    run(made, x)
    saved = made.state_dict()
    assert saved["_extra_state"].numel() == 0
    saved["_extra_state"] = bomb(tmp_path / "ran")
    made.load_state_dict(saved)
    assert not (tmp_path / "ran").exists()


def bomb(path):
    """A state of which Python's own reader would have a program run."""

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch '{path}'",)

    return torch.frombuffer(bytearray(pickle.dumps(Bomb())), dtype=torch.uint8)


def test_a_foreign_state_runs_nothing(tmp_path, monkeypatch):
    made = te.Linear(WIDE, TALL, bias=False, params_dtype=torch.float32, device="cpu")
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    protect_states(made, Namespace())
    with pytest.raises(CheckpointError, match=r"would run \S+system"):
        made.load_state_dict(made.state_dict() | {"_extra_state": bomb(tmp_path / "ran")})
    assert not (tmp_path / "ran").exists()


def test_a_state_of_the_engines_own_recipes_is_read():
    """Of delayed scaling, which keeps what it has seen."""
    made = te.Linear(WIDE, TALL, bias=False, params_dtype=torch.float32, device="cpu")
    protect_states(made, Namespace())
    state = {"recipe": DelayedScaling(), "extra_fp8_variables": {"num_gemms": 1}}
    content = pickle.dumps(state | {"scale_fwd": torch.ones(3), "amax": torch.zeros(1, 3)})
    reader = StateReader(io.BytesIO(content))
    found = check_pickle(reader, "state")
    assert found["recipe"] == DelayedScaling()
    assert torch.equal(found["scale_fwd"], torch.ones(3))
