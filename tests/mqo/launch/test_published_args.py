"""Which arguments of a checkpoint keep its model from being published."""

import pytest
from mqo.errors import ConvertError
from mqo.launch.published_args import check_published, table

# What upstream's parser has by default, of the arguments that are refused at any other value.
DEFAULTS = dict.fromkeys(table().refused) | {
    "softmax_type": "vanilla",
    "glu_linear_offset": 0.0,
    "rotary_percent": 1.0,
    "add_position_embedding": True,
    "moe_router_score_function": "softmax",
}
PARSER = {name: {"flag": f"--{name}", "default": value} for name, value in DEFAULTS.items()}
GROUPED = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "qk_layernorm": False,
    "num_experts": None,
    "mtp_num_layers": None,
}
LATENT = GROUPED | {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "num_experts": 8,
    "moe_router_pre_softmax": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
KINDS = {"grouped": GROUPED, "latent": LATENT}
by_kind = pytest.mark.parametrize("kind", KINDS)


@by_kind
def test_a_model_with_defaults_is_published(kind):
    anything = dict.fromkeys(table().without_effect | table().expressed, "anything")
    check_published(
        anything | DEFAULTS | KINDS[kind] | {"multi_latent_attention": kind == "latent"}, PARSER
    )


@by_kind
@pytest.mark.parametrize("name", sorted(table().refused))
def test_a_refused_argument_must_have_its_default(kind, name):
    check_published(KINDS[kind] | {name: DEFAULTS[name]}, PARSER)
    with pytest.raises(ConvertError, match=f"--{name}: {name} = 'another'") as caught:
        check_published(KINDS[kind] | {name: "another"}, PARSER)
    assert repr(DEFAULTS[name]) in caught.value.expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window_size", [8, 0]),
        ("no_rope_freq", [0, 0]),
        ("activation_func_clamp_value", 0.0),
        ("activation_func_clamp_value", 0.01),
        ("glu_linear_offset", 1.0),
        ("softmax_type", "off-by-one"),
        ("rotary_seq_len_interpolation_factor", 4),
    ],
)
def test_what_changes_the_function_and_no_shape_is_refused(name, value):
    with pytest.raises(ConvertError, match=name):
        check_published(GROUPED | {name: value}, PARSER)


@pytest.mark.parametrize(
    ("kind", "change", "fits"),
    [
        ("grouped", {"normalization": "LayerNorm"}, False),
        ("grouped", {"num_experts": 8}, True),
        ("grouped", {"qk_layernorm": True}, True),
        ("grouped", {"add_qkv_bias": True}, True),
        ("latent", {"add_qkv_bias": True}, False),
        ("latent", {"qk_layernorm": False}, False),
        ("latent", {"moe_router_pre_softmax": False}, False),
        ("grouped", {"moe_router_pre_softmax": False}, True),
        ("latent", {"moe_router_load_balancing_type": ["none", "aux_loss"]}, True),
        ("latent", {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"]}, False),
        ("latent", {"moe_router_load_balancing_type": "sinkhorn"}, False),
        ("latent", {"mtp_num_layers": 0}, True),
        ("latent", {"mtp_num_layers": 1}, False),
        ("grouped", {"hybrid_mlp_ratio": 0.5}, False),
    ],
)
def test_some_arguments_have_several_values(kind, change, fits):
    if fits:
        check_published(KINDS[kind] | change, PARSER)
        return
    with pytest.raises(ConvertError, match=next(iter(change))):
        check_published(KINDS[kind] | change, PARSER)


@pytest.mark.parametrize("value", [None, False, "", [], {}])
def test_an_argument_of_another_release_must_be_empty(value):
    check_published(GROUPED | {"of_another_release": value}, PARSER)
    # Also a listed one that this tree's parser lacks.
    check_published(GROUPED | {"window_size": value}, {})


@pytest.mark.parametrize("value", [True, 0, 0.0, 1, "x", [0], {"a": 1}])
def test_an_argument_of_another_release_with_a_value_is_refused(value):
    for name in ("of_another_release", "window_size"):
        with pytest.raises(ConvertError, match=name):
            check_published(GROUPED | {name: value}, {})


def test_the_user_may_ignore_an_argument_of_another_release():
    args = GROUPED | {"of_another_release": 1, "of_a_third": 2}
    check_published(args, {}, ["of_another_release", "of_a_third"])
    with pytest.raises(ConvertError, match="of_a_third") as caught:
        check_published(args, {}, ["of_another_release"])
    assert "--ignore-argument of_a_third" in caught.value.help
    with pytest.raises(ConvertError, match="window_size"):
        check_published(GROUPED | {"window_size": [8, 0]}, PARSER, ["window_size"])
