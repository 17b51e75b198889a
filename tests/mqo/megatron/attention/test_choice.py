import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from mqo.megatron.attention import choice
from mqo.megatron.attention.choice import FusedAttentionError, without_scores
from mqo.megatron.attention.paths import chunked_context, fused_context
from mqo.quant.backend import fake_quantize
from mqo.quant.plugin_decorators import quantizer
from mqo.quant.progress import set_step

from .conftest import Layer

NONE = {"qk": "none", "pv": "none"}
MXFP8 = NONE | {"pv": "mxfp8"}


def tensors(sq=4, sk=4, device=None):
    return torch.ones(sq, 1, 2, 8, device=device), torch.ones(sk, 1, 2, 8, device=device)


def causal(sq=4, sk=4):
    return torch.ones(1, 1, sq, sk, dtype=torch.bool).triu(sk - sq + 1)


def path(layer, types, query, key, mask):
    """The function that runs, None for upstream's own path."""
    attend = without_scores(layer, types, query, key, mask)
    return attend and attend.func


@pytest.mark.parametrize("backend", ["auto", "flash", "fused", ""])
@pytest.mark.parametrize("mask", [None, causal()], ids=["no mask", "a causal mask"])
def test_a_plain_causal_layer_runs_fused(backend, mask):
    assert path(Layer(backend), NONE, *tensors(), mask) is fused_context
    assert path(Layer(backend), NONE | {"qk": "mxfp8"}, *tensors(), mask) is fused_context


@pytest.mark.parametrize("backend", ["auto", ""])
@pytest.mark.parametrize("mask", [None, causal(), ~causal()], ids=["none", "causal", "another"])
def test_a_pv_type_runs_in_chunks(backend, mask):
    attend = without_scores(Layer(backend), MXFP8, *tensors(), mask)
    assert attend.func is chunked_context
    # A causal mask needs no tensor.
    assert (attend.args[-1] is None) == (mask is None or torch.equal(mask, causal()))


@pytest.mark.parametrize("backend", ["unfused", "local"])
@pytest.mark.parametrize("types", [NONE, MXFP8])
def test_unless_it_is_not_to(backend, types):
    assert path(Layer(backend), types, *tensors(), None) is None
    layer = Layer()
    layer.config.attention_backend = backend  # named by text
    assert path(layer, types, *tensors(), None) is None


def test_without_a_plain_literal_upstreams_path_runs():
    assert path(Layer(), {"qk": "none"}, *tensors(), None) is None


@pytest.mark.parametrize(
    "text", ['[layers]\nexclude = ["pv:*"]\n', '[operands]\n"pv.probs" = {quant_type = "none"}\n']
)
def test_probabilities_that_stay_unquantized_need_no_chunks(options, text):
    options(text)
    assert path(Layer("flash"), MXFP8, *tensors(), None) is fused_context


def test_probabilities_that_are_only_transformed_need_chunks(options):
    options(
        '[operands]\n"pv.value" = { hadamard = 16 }\n'
        '"pv.probs" = { quant_type = "none", hadamard = 16 }\n'
    )
    assert path(Layer(), MXFP8, *tensors(), None) is chunked_context
    with pytest.raises(FusedAttentionError, match="transforms its probabilities"):
        path(Layer("flash"), MXFP8, *tensors(), None)


def test_a_layer_that_is_exempt_runs_as_if_pv_had_no_type():
    layer = Layer()
    layer.mqo_exempt = True
    assert path(layer, MXFP8, *tensors(), None) is fused_context


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("attn_mask_type.name", "padding", "mask type is padding"),
        ("attn_mask_type", None, "mask type is None"),
        ("scale_mask_softmax.window_size", (128, 0), "sliding window"),
        ("softmax_offset", torch.zeros(2), "offset"),
        ("attention_dropout.p", 0.1, "--attention-dropout"),
    ],
)
def test_what_a_layer_has_that_only_upstreams_path_does(name, value, why, capsys):
    layer = changed(name, value)
    assert path(layer, NONE, *tensors(), None) is None
    choice._said.clear()
    for _ in range(2):
        assert path(layer, MXFP8, *tensors(), None) is None
    said = capsys.readouterr().out
    assert said.count(why) == said.count("attention layer 3") == 1


def changed(name, value):
    layer = Layer()
    owner, _, attribute = name.rpartition(".")
    setattr(getattr(layer, owner) if owner else layer, attribute, value)
    return layer


def test_chunks_can_more_than_kernels():
    for layer, where in (
        (changed("scale_mask_softmax.scale", 3), {}),
        (Layer(), {"device": "meta"}),
    ):
        assert path(layer, NONE, *tensors(**where), None) is None
        assert path(layer, MXFP8, *tensors(**where), None) is chunked_context


def test_attributes_of_later_releases_may_be_missing():
    layer = Layer()
    del layer.softmax_offset, layer.scale_mask_softmax.window_size
    for types in (NONE, MXFP8):
        assert path(layer, types, *tensors(), None)


@pytest.mark.parametrize("types", [NONE, MXFP8])
def test_dropout_counts_in_training_alone(types):
    layer = Layer(dropout=0.1)
    layer.attention_dropout.eval()
    assert path(layer, types, *tensors(), None)


@pytest.mark.parametrize("types", [NONE, MXFP8])
def test_a_part_of_the_queries_needs_a_mask_that_says_what_they_see(types):
    assert path(Layer(), types, *tensors(2, 4), None) is None
    assert path(Layer(), types, *tensors(1, 4), None)
    assert path(Layer(), types, *tensors(1, 4), causal(1, 4))


@pytest.mark.parametrize("mask", [~causal(), causal() * 1.0, torch.zeros(4, 4) > 1])
def test_any_other_mask_is_not_fused(mask):
    assert path(Layer(), NONE, *tensors(), mask) is None


@pytest.mark.parametrize("mask", [causal() * 1.0, ~causal()[0, 0], ~causal().expand(3, 1, 4, 4)])
def test_a_mask_in_another_form_has_no_chunks(mask):
    assert path(Layer(), MXFP8, *tensors(), mask) is None


def test_an_amax_of_all_probabilities_is_known_of_a_causal_mask_alone():
    types = NONE | {"pv": "nvfp4"}
    assert path(Layer(), types, *tensors(), causal()) is chunked_context
    assert path(Layer(), types, *tensors(), ~causal()) is None
    assert path(Layer(), types, *tensors(1, 4), None) is None


def test_so_is_that_of_hifp8_with_a_scale_of_the_tensor(options):
    types = NONE | {"pv": "hifp8"}
    assert path(Layer(), types, *tensors(), ~causal()) is chunked_context
    options("[quantizer]\ntensor_scale = true\n")
    assert path(Layer(), types, *tensors(), causal()) is chunked_context
    assert path(Layer(), types, *tensors(), ~causal()) is None


@pytest.mark.parametrize("backend", ["flash", "fused"])
def test_a_kernel_that_is_demanded_and_impossible_is_an_error_with_the_reason(backend):
    layer = Layer(backend)
    with pytest.raises(FusedAttentionError, match=rf"layer 3 .*to mxfp8.*-backend {backend}\. "):
        path(layer, MXFP8, *tensors(), None)
    layer.mqo_layer = "decoder.layers.2.self_attention.core_attention"
    layer.softmax_offset = torch.zeros(2)
    with pytest.raises(FusedAttentionError, match=r"decoder\.layers\.2\..*offset"):
        path(layer, NONE, *tensors(), None)


def test_a_schedule_of_pv_chooses_step_by_step(options):
    options('[schedule]\npv = "none until 2, then mxfp8"\n')
    chosen = []
    for step in range(4):
        set_step(step)
        chosen.append(path(Layer(), NONE, *tensors(), None))
    assert chosen == [fused_context, fused_context, chunked_context, chunked_context]


# -- custom quantizers ------------------------------------------------------------------------


@pytest.fixture
def own_mxfp4():
    """The shapes of the tensors that a quantizer with the values of mxfp4 has rounded."""
    shapes = []

    @quantizer("own_mxfp4", block=32)
    def quantize(x, context):
        shapes.append((context.operand, *x.shape))
        return fake_quantize(x, "mxfp4")

    return shapes


def test_a_quantizer_of_the_user_takes_all_probabilities(own_mxfp4, capsys):
    choice._said.clear()
    assert path(Layer(), NONE | {"pv": "own_mxfp4"}, *tensors(), None) is None
    assert "own_mxfp4" in capsys.readouterr().out
    with pytest.raises(FusedAttentionError, match="own_mxfp4"):
        path(Layer("flash"), NONE | {"pv": "own_mxfp4"}, *tensors(), None)


def test_a_quantizer_of_query_and_key_runs_fused(own_mxfp4):
    assert path(Layer(), NONE | {"qk": "own_mxfp4"}, *tensors(), None) is fused_context


def test_one_that_does_not_round_the_probabilities_runs_fused(own_mxfp4, options):
    options('[operands]\n"pv.probs" = { quant_type = "none" }\n')
    assert path(Layer(), NONE | {"pv": "own_mxfp4"}, *tensors(), None) is fused_context


@pytest.fixture
def attend(groups, options):
    """A function that returns context and gradients of upstream's attention with a type.

    The source of its class has no types, so a schedule names them.
    """

    def attend(kind, backend):
        options("[schedule]\n" + "".join(f'{s} = "{kind} until 9, then none"\n' for s in NONE))
        sizes = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
        chosen = TransformerConfig(
            **sizes,
            **{"num_query_groups": 2, "attention_dropout": 0.0, "masked_softmax_fusion": False},
            attention_backend=backend,
        )
        layer = DotProductAttention(chosen, 1, AttnMaskType.causal, "self")
        generator = torch.Generator().manual_seed(0)
        given = [
            torch.randn(40, 2, heads, 16, generator=generator).requires_grad_()
            for heads in (4, 2, 2)
        ]
        hidden = torch.ones(1, 1, 40, 40, dtype=torch.bool).triu(1)
        context = layer(*given, hidden)
        return context, *torch.autograd.grad(context.square().sum(), given)

    return attend


@pytest.mark.parametrize("backend", [AttnBackend.auto, AttnBackend.unfused])
def test_its_attention_has_the_bits_of_upstreams_path_with_the_format(own_mxfp4, attend, backend):
    results = attend("own_mxfp4", backend)
    assert ("probs", 2 * 4 * 40, 64) in own_mxfp4
    assert {operand for operand, *_ in own_mxfp4} == {"query", "key", "probs", "value"}
    for own, expected in zip(results, attend("mxfp4", AttnBackend.unfused), strict=True):
        assert own.equal(expected)
    assert not results[0].equal(attend("none", AttnBackend.unfused)[0])
