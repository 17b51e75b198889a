"""Quantizers of users: what they get and return, where they are types, and their errors."""

import os
import signal
import threading

import pytest
import torch
from mqo.quant.backend import fake_quantize
from mqo.quant.comparison import compare_formats, sqnr
from mqo.quant.config import current
from mqo.quant.gemms import gemm_operands
from mqo.quant.linear import QuantLinear
from mqo.quant.model import quantize_model
from mqo.quant.plugin_context import QuantizerError
from mqo.quant.plugin_decorators import quantizer
from mqo.quant.plugin_rows import PluginRow
from mqo.quant.progress import set_step
from mqo.quant.quant_config import QuantConfig
from mqo.quant.quantization import ModelQuantization
from mqo.quant.recipe import Recipe
from mqo.quant.recipe_operands import LINEAR_SITES
from mqo.quant.scales import alpha_of
from mqo.quant.spec import QuantSpec
from mqo.quant.stochastic import RANDOM_BITS, draws
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .tensors import normal, wide_dtypes

K, N = 72, 40  # no multiples of a block


def own_mxfp4():
    @quantizer("own_mxfp4", block=32)
    def quantize(x, context):
        return fake_quantize(x, "mxfp4")


def own_nvfp4():
    """The same two factors as those of the format."""

    @quantizer("own_nvfp4", block=16, square=True, needs_amax=True)
    def quantize(x, context):
        spec = QuantSpec("nvfp4", tile=context.tile, without_alpha=True)
        values = fake_quantize(x, spec, amax=context.amax)
        return values, alpha_of(context.amax.item(), spec)


def integers():
    @quantizer("integers", stochastic=True)
    def quantize(x, context):
        return (x + context.rand()).floor()


def layer_of(kind, dtype, **options):
    types = dict.fromkeys(LINEAR_SITES, kind)
    shared = ModelQuantization(QuantConfig(asked=types, **options))
    layer = QuantLinear(K, N, bias=False, quantization=shared, name="layer", dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(normal(N, K, seed=1))
    return layer


def passes(layer):
    x = normal(5, 3, K, seed=2, dtype=layer.weight.dtype).requires_grad_()
    y = layer(x)
    y.backward(normal(5, 3, N, seed=3, dtype=layer.weight.dtype))
    return y.detach(), x.grad, layer.weight.grad


@wide_dtypes
@pytest.mark.parametrize(("define", "kind"), [(own_mxfp4, "mxfp4"), (own_nvfp4, "nvfp4")])
def test_a_format_as_a_function_has_the_bits_of_the_format(define, kind, dtype):
    define()
    for options in ({}, {"cache_weights": True}):
        expected = passes(layer_of(kind, dtype, **options))
        for own, other in zip(
            passes(layer_of(f"own_{kind}", dtype, **options)), expected, strict=True
        ):
            assert own.equal(other)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(7, 40, 33), (1, 1, 1), (0, 4, 4), (5, 32, 32)])
def test_rows_are_along_the_axis_and_padded_to_blocks(shape, axis):
    own_mxfp4()
    x = normal(*shape)
    assert fake_quantize(x, "own_mxfp4", axis=axis).equal(fake_quantize(x, "mxfp4", axis=axis))
    strided = x.transpose(0, 2).contiguous().transpose(0, 2)
    assert fake_quantize(strided, "own_mxfp4", axis=axis).equal(
        fake_quantize(x, "mxfp4", axis=axis)
    )


def test_the_function_gets_rows_a_tile_and_the_operand():
    calls = []

    @quantizer("seen", block=16, square=True, needs_amax=True)
    def quantize(x, context):
        calls.append((tuple(x.shape), x.dtype, context.tile, context.amax.item(), context))
        return x

    layer = layer_of("seen", torch.bfloat16)
    layer.quantization.set_step(3)
    passes(layer)
    shapes = {(p.site, p.operand): shape for shape, *_, p in calls}
    assert shapes == {
        **{("fprop", "x"): (15, 80), ("fprop", "weight"): (40, 80)},
        **{("dgrad", "grad"): (15, 48), ("dgrad", "weight"): (72, 48)},
        **{("wgrad", "grad"): (40, 16), ("wgrad", "x"): (72, 16)},
    }
    assert {(dtype, tile) for _, dtype, tile, _, _ in calls} == {(torch.float32, "row")}
    assert {(p.layer, p.step) for *_, p in calls} == {("layer", 3)}
    fake_quantize(normal(20, 40), QuantSpec("seen", tile="square"))
    shape, _, tile, amax, context = calls[-1]
    assert (shape, tile, context.site) == ((32, 48), "square", "")
    assert amax == normal(20, 40).abs().max().item()


def test_random_numbers_depend_on_the_seed_and_the_position():
    integers()
    x = torch.full((64, 64), 0.3)
    first = fake_quantize(x, "integers", seed=1)
    assert first.unique().tolist() == [0, 1] and abs(first.mean() - 0.3) < 0.03
    assert fake_quantize(x.t().contiguous().t(), "integers", axis=0, seed=1).equal(first)
    assert not fake_quantize(x, "integers", seed=2).equal(first)
    with pytest.raises(ValueError, match="seed None"):
        fake_quantize(x, "integers")


def test_steps_draw_anew_and_a_recomputed_pass_repeats():
    integers()
    layer, x = layer_of("integers", torch.float32), normal(4, K).requires_grad_()
    outputs = [layer(x), layer(x)]
    layer.quantization.set_step(1)
    outputs.append(layer(x))
    layer.quantization.set_step(0)
    assert layer(x).equal(outputs[0])
    assert len({tuple(y.flatten().tolist()) for y in outputs}) == 3
    kept, recomputed = layer_of("integers", torch.float32), layer_of("integers", torch.float32)
    y = torch.utils.checkpoint.checkpoint(recomputed, x, use_reentrant=False)
    assert y.equal(kept(x))
    for output in (y, kept(x)):
        output.sum().backward()


def test_its_name_is_a_type_wherever_one_is_named(tmp_path):
    own_nvfp4()
    model = nn.Sequential(nn.Linear(K, N), nn.Linear(N, K))
    shared = quantize_model(model, "own_nvfp4")
    model(normal(4, K)).sum().backward()
    assert {record.quant_type for record in shared.records()} == {"own_nvfp4"}
    path = tmp_path / "mine.toml"
    path.write_text(
        'types = { fprop = "own_nvfp4" }\n[operands]\n"fprop.weight" = { tile = "square" }\n'
        '"fprop.x" = { quant_type = "own_nvfp4" }\n'
        '[[rules]]\nlayers = "0"\nquant_type = "own_nvfp4"\n'
    )
    quantize_model(nn.Sequential(nn.Linear(K, N)), str(path))
    assert Recipe.load(str(path)).resolved()["fprop", "weight"].spec.tile == "square"
    x = normal(4, K)
    operand = gemm_operands("fprop", "own_nvfp4", None).lhs(x)
    torch.testing.assert_close(operand, fake_quantize(x, "nvfp4"))  # alpha: in float32, or before
    assert sqnr(x, "own_nvfp4") == pytest.approx(sqnr(x, "nvfp4"))
    labels = [error.label for error in compare_formats(x, ["nvfp4", "own_nvfp4"]).errors]
    assert labels == ["nvfp4 1x16", "own_nvfp4 1x16"]


def returning(result):
    def define():
        @quantizer("wrong")
        def quantize(x, context):
            return result(x, context)

    return define


def fails(x, context):
    raise ZeroDivisionError("a reason")


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda x: x, r"in line \d+ of .*test_plugins\.py: TypeError: .* takes 1 positional"),
        (fails, r"\[4, 72\], in line \d+ of .*test_plugins\.py: ZeroDivisionError: a reason"),
        (lambda x, _: x[:, 1:], r"returned \[4, 71\] for x of fprop, layer layer; valid: .*4, 72"),
        (lambda x, _: 3.0, "returned float"),
        (lambda x, context: x + context.amax, "needs_amax=True"),
        (lambda x, context: x + context.rand(), "stochastic=True"),
    ],
)
def test_an_error_names_the_place(result, text):
    returning(result)()
    with pytest.raises(QuantizerError, match=text):
        layer_of("wrong", torch.float32)(normal(4, K))


def test_an_error_in_a_library_names_the_line_of_the_function():
    @quantizer("wrong")
    def quantize(x, context):
        return torch.einsum("ij,jk", x, x)

    line = quantize.__code__.co_firstlineno + 2
    with pytest.raises(QuantizerError, match=rf"line {line} of .*test_plugins\.py"):
        fake_quantize(normal(4, 32), "wrong")


def test_a_decorator_without_a_name_is_refused():
    with pytest.raises(TypeError, match=r"@quantizer\('name'\)"):

        @quantizer
        def quantize(x, context):
            return x


def test_a_size_that_is_not_a_multiple_is_refused():
    @quantizer("mine", multiple=24)
    def mine(x, context):
        return x

    assert fake_quantize(torch.ones(48, 5), "mine", axis=0).shape == (48, 5)
    with pytest.raises(QuantizerError, match=r"a tensor has 5 .* mine needs a multiple of 24"):
        fake_quantize(torch.ones(48, 5), "mine")


def test_attention_in_chunks_refuses_it():
    own_mxfp4()
    operands = gemm_operands("pv", "own_mxfp4", nn.Identity())
    with pytest.raises(ValueError, match="--attention-backend unfused"):
        operands.lhs_parts((1, 2, 3), 1.0, torch.device("cpu"))


def test_codes_are_refused():
    from mqo.quant.packing import pack

    own_mxfp4()
    with pytest.raises(ValueError, match="'own_mxfp4'"):
        pack(normal(4, 32), QuantSpec("own_mxfp4"))


def test_the_tensor_of_the_user_is_not_written_to():
    @quantizer("writes")
    def quantize(x, context):
        x.numpy()[:] = 0
        return x.mul_(2)

    x = normal(4, 32)
    assert fake_quantize(x, "writes").eq(0).all() and x.equal(normal(4, 32))
    returned = quantizer("returns")(lambda x, context: x)
    assert fake_quantize(x, "returns").data_ptr() != x.data_ptr() and returned


def test_a_function_that_is_defined_again_is_used_from_then_on():
    quantizer("mine")(lambda x, context: x)
    layer = layer_of("mine", torch.float32, cache_weights=True)
    x = normal(4, K)
    before = layer(x)
    quantizer("mine", stochastic=True)(lambda x, context: 0 * x)
    assert before.ne(0).any() and layer(x).eq(0).all()


def rounded_in_pieces(independent):
    @quantizer("pieces", stochastic=True, needs_amax=True, independent_rows=independent)
    def quantize(x, context):
        assert x.shape[0] < 3000 or not independent
        step = context.amax / 8
        return (x / step + context.rand()).floor(), step

    return fake_quantize(normal(3000, K), "pieces", seed=1)


def test_pieces_on_threads_have_the_values_of_the_whole():
    assert rounded_in_pieces(True).equal(rounded_in_pieces(False))


def test_pieces_with_other_alphas_are_refused():
    @quantizer("wrong", independent_rows=True)
    def quantize(x, context):
        return x, x.abs().amax()

    with pytest.raises(QuantizerError, match="independent_rows=False"):
        fake_quantize(normal(3000, K), "wrong")


def test_a_nan_is_the_same_alpha_in_all_pieces():
    @quantizer("scaled", independent_rows=True, needs_amax=True)
    def quantize(x, context):
        return x, context.amax

    x = normal(3000, K)
    x[0, 0] = torch.nan
    assert fake_quantize(x, "scaled").isnan().all()


def test_a_quantizer_in_pieces_may_call_another():
    @quantizer("inner", block=4096, independent_rows=True)
    def inner(x, context):
        return x.round()

    @quantizer("outer", independent_rows=True)
    def outer(x, context):
        return fake_quantize(x, "inner")

    assert fake_quantize(normal(3000, K), "outer").equal(normal(3000, K).round())


def test_the_threads_of_torch_stay_as_many():
    before, counts = torch.get_num_threads(), []
    rounded_in_pieces(True)
    thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert counts == [torch.get_num_threads()] == [before]


def test_an_error_on_a_thread_names_the_place():
    quantizer("wrong", independent_rows=True)(fails)
    with pytest.raises(QuantizerError, match="ZeroDivisionError: a reason"):
        fake_quantize(normal(3000, K), "wrong")


def test_a_forked_process_has_threads_of_its_own():
    rounded_in_pieces(True)
    if (child := os.fork()) == 0:
        signal.alarm(20)
        os._exit(0 if rounded_in_pieces(True).isfinite().all() else 1)
    assert os.waitpid(child, 0)[1] == 0


# -- options ---------------------------------------------------------------------------------------

DEFAULTS = {"on": True, "count": 3, "gain": 2.0, "kind": "a"}


@pytest.fixture
def seen():
    """The options that the quantizer `tuned` has been called with, which it multiplies by."""
    calls = []

    @quantizer("tuned", options=DEFAULTS)
    def tuned(x, context):
        calls.append(context.options)
        return x * context.options["gain"]

    return calls


def test_chosen_options_override_the_defaults(seen):
    spec = QuantSpec("tuned", options={"gain": 4, "on": False})
    assert fake_quantize(torch.ones(4), spec).eq(4).all()
    assert seen == [DEFAULTS | {"gain": 4.0, "on": False}]
    assert type(seen[0]["gain"]) is float  # whatever number the user wrote
    assert spec == QuantSpec("tuned", options=(("on", False), ("gain", 4.0), ("kind", "a")))
    assert len({spec, QuantSpec("tuned"), QuantSpec("tuned", options=DEFAULTS)}) == 2


def test_a_function_cannot_change_the_options_of_the_next_call():
    @quantizer("tuned", options={"gain": 2.0})
    def tuned(x, context):
        gain = context.options["gain"]
        dict.update(context.options, gain=gain + 1)
        return gain * x

    for _ in range(2):
        assert fake_quantize(torch.ones(4), "tuned").eq(2).all()


def test_the_options_of_a_model_reach_each_call(seen):
    passes(layer_of("tuned", torch.float32, plugins={"tuned": PluginRow(options={"count": 7})}))
    assert seen == [DEFAULTS | {"count": 7}] * 6


def test_an_operand_has_options_of_its_own(seen, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'types = { fprop = "tuned" }\n[plugin_options.tuned]\nkind = "b"\ncount = 5\n'
        '[operands]\n"fprop.weight" = { options = { kind = "c", gain = 3 } }\n'
        '[[rules]]\nlayers = "1"\nrecipe = "other"\n'
        '[recipes.other]\ntypes = { fprop = "tuned" }\n'
        'operands = { "fprop.x" = { options = { on = false } } }\n'
    )
    model = nn.Sequential(nn.Linear(K, N), nn.Linear(N, K))
    quantize_model(model, str(path))
    model(normal(4, K))
    of_recipe = DEFAULTS | {"kind": "b", "count": 5}
    assert seen == [
        of_recipe,
        of_recipe | {"kind": "c", "gain": 3.0},
        of_recipe | {"on": False},
        of_recipe,
    ]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ('"fprop.x" = { options = { gian = 1.0 } }', "'gian' of tuned"),
        ('"fprop.x" = { options = { count = 1.5 } }', "count = 1.5 of tuned"),
        ('"fprop.x" = { options = { kind = [1] } }', "options"),
        ('"fprop.x" = { options = 3 }', "options"),
        ('"dgrad.grad" = { options = { gain = 1.0 } }', "needs a quantized operand"),
        ('"wgrad.x" = { options = { gain = 1.0 } }', "a custom quantizer, which mxfp8 is not"),
    ],
)
def test_options_that_an_operand_cannot_have_are_refused(seen, tmp_path, row, text):
    path = tmp_path / "mine.toml"
    path.write_text(f'types = {{ fprop = "tuned", wgrad = "mxfp8" }}\n[operands]\n{row}\n')
    with pytest.raises(ValueError, match=text):
        Recipe.load(str(path))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gian": 1.0}, "'gian' of tuned; valid: on, count, gain, kind"),
        ({"gain": "1.0"}, "gain = '1.0' of tuned"),
    ],
)
def test_an_unknown_option_and_another_type_are_refused(seen, tmp_path, options, text):
    with pytest.raises(ValueError, match=text):
        QuantSpec("tuned", options=options)
    with pytest.raises(ValueError, match=text):
        layer_of("tuned", torch.float32, plugins={"tuned": PluginRow(options=options)})(
            normal(4, K)
        )
    assert seen == []


def test_only_a_quantizer_has_options(seen):
    with pytest.raises(ValueError, match="mxfp8"):
        QuantSpec("mxfp8", options={"gain": 1.0})
    quantizer("bare")(lambda x, context: x)
    with pytest.raises(ValueError, match="valid: none"):
        QuantSpec("bare", options={"gain": 1.0})


def test_options_of_a_quantizer_that_a_recipe_does_not_use_are_refused(seen, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('types = { fprop = "mxfp8" }\n[plugin_options.tuned]\nkind = "b"\n')
    with pytest.raises(ValueError, match="'tuned'"):
        Recipe.load(str(path))


# -- where no values are -------------------------------------------------------------------------


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("axis", [0, -1])
def test_tensors_without_values_keep_their_shape_and_call_nothing(known, axis):
    """As when memory is simulated, also of a run whose file was not run."""
    if known:
        quantizer("mine", block=32, needs_amax=True)(fails)
    else:
        PluginRow(declared={"block": 32, "needs_tensor_amax": True}).declare("mine")
    for dtype in (torch.float32, torch.bfloat16):
        result = fake_quantize(torch.empty(3, 5, 40, device="meta", dtype=dtype), "mine", axis=axis)
        assert (result.shape, result.dtype) == ((3, 5, 40), dtype) and result.is_meta
        with FakeTensorMode():
            result = fake_quantize(torch.ones(5, 40, dtype=dtype), "mine", axis=axis)
        assert (result.shape, result.dtype) == ((5, 40), dtype)


def test_packed_activations_are_refused(options):
    """They are codes, of which a quantizer in Python has none."""
    own_mxfp4()
    options('[asked]\nfprop = "own_mxfp4"\n[quantizer]\nsave_activations = "packed"\n')
    with pytest.raises(ValueError, match=r"save_activations .*own_mxfp4"):
        current()
    options(
        '[asked]\nfprop = "mxfp8"\n[quantizer]\nsave_activations = "packed"\n'
        '[[rules]]\nlayers = "linear:a"\nquant_type = "own_mxfp4"\n'
    )
    with pytest.raises(ValueError, match=r"save_activations .*own_mxfp4"):
        current()
    options('[asked]\nfprop = "mxfp8"\n[quantizer]\nsave_activations = "packed"\n')
    assert current().save_activations == "packed"


PROBS = '[operands]\n"pv.probs" = { quant_type = "KIND" }\n'


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ('[asked]\npv = "own_mxfp4"\n', True),
        ('[asked]\npv = "mxfp8"\n[schedule]\npv = "mxfp8 until 3, then own_mxfp4"\n', True),
        ('[asked]\npv = "mxfp8"\n' + PROBS.replace("KIND", "own_mxfp4"), True),
        ('[asked]\npv = "own_mxfp4"\n' + PROBS.replace("KIND", "mxfp8"), False),
        ('[asked]\npv = "mxfp8"\nqk = "own_mxfp4"\nfprop = "own_mxfp4"\n', False),
    ],
)
def test_probabilities_in_chunks_are_refused(options, text, refused):
    own_mxfp4()
    options(f"{text}[quantizer]\nunnormalized_probs = true\n")
    if not refused:
        assert current().unnormalized_probs
        return
    with pytest.raises(ValueError, match=r"unnormalized_probs .*own_mxfp4"):
        current()
    options(f"{text}[quantizer]\nunnormalized_probs = false\n")
    assert not current().unnormalized_probs


@pytest.mark.parametrize(
    "text",
    [
        '[asked]\ndv = "own_mxfp4"\n',
        '[asked]\ndq = "mxfp8"\n[schedule]\ndq = "mxfp8 until 3, then own_mxfp4"\n',
        '[asked]\ndk = "mixed"\n[operands]\n"dk.ds" = { quant_type = "own_mxfp4" }\n'
        '"dk.query" = { quant_type = "mxfp8" }\n',
    ],
)
def test_products_of_attentions_backward_pass_are_refused(options, text):
    own_mxfp4()
    options(text)
    with pytest.raises(ValueError, match=r"^.*d[vqk] computes attention in chunks.*own_mxfp4"):
        current()


def test_random_numbers_of_the_padding_are_drawn_too():
    seen = []

    @quantizer("seen", block=16, square=True, stochastic=True)
    def quantize(x, context):
        seen.append(context.rand())
        return x.clone()

    for tile, shape in (("row", (5, 32)), ("square", (16, 32))):
        fake_quantize(normal(5, 20), QuantSpec("seen", tile=tile), seed=3)
        numbers = seen.pop()
        assert numbers.shape == shape and numbers.unique().numel() == numbers.numel()
        whole = draws(torch.Size([5, 20]), 3) / 2**RANDOM_BITS
        assert numbers[:5, :20].equal(whole.float())


def test_both_operands_of_a_gemm_share_random_numbers(options):
    options("[asked]\nfprop = 'shared'\n")
    seen = []

    @quantizer("shared", stochastic=True, independent_rows=True)
    def quantize(x, context):
        seen.append((context.site, context.operand, context.shared_rand(8).tolist()))
        return x + 0

    weight = nn.Parameter(normal(4, 8))
    for step, site in ((0, "fprop"), (0, "fprop"), (0, "wgrad"), (1, "fprop")):
        if step:
            set_step(step)
        operands = gemm_operands(site, "shared", weight)
        operands.lhs(normal(6, 8)), operands.rhs(weight)
    pairs = [(seen[i][2], seen[i + 1][2]) for i in range(0, 8, 2)]
    assert all(left == right and len(set(left)) == 8 for left, right in pairs)
    # Not in the next micro-batch, at another site, and in the next step.
    assert len({tuple(left) for left, _ in pairs}) == 4
    assert fake_quantize(normal(2, 8), "shared", seed=3) is not None
    fake_quantize(normal(3, 8), "shared", seed=3)
    assert seen[-1][2] == seen[-2][2]  # outside of a model, those of a seed


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0), (2, 0, 64)])
def test_a_tensor_without_elements_is_not_rounded(shape):
    """As of an expert without tokens."""

    @quantizer("mine", needs_amax=True, stochastic=True, independent_rows=True)
    def quantize(x, context):
        return x / x.abs().amax(dim=1, keepdim=True)

    x = torch.empty(shape)
    for axis in range(-1, len(shape) - 1):
        assert fake_quantize(x, "mine", axis=axis, seed=1).shape == x.shape
