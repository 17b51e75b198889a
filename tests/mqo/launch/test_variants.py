"""Ways to quantize, as a command line lists them."""

import pytest
from mqo.errors import MqoError
from mqo.launch.variants import variants
from mqo.quant.plugin_rows import declare
from mqo.quant.plugins import PLUGINS, Plugin


def test_recipes_take_their_changes_with_them():
    (plain, changed) = variants("", "nvfp4, nvfp4 without hadamard without stochastic")
    assert (plain.name, plain.words) == ("nvfp4-recipe", ("--recipe", "nvfp4"))
    assert changed.name == "nvfp4-recipe-without-hadamard-without-stochastic"
    assert changed.rest["recipe"].ingredients == ("2d", "kept-blocks")


def test_the_file_of_a_recipe_may_have_spaces(tmp_path):
    own = tmp_path / "my own.toml"
    own.write_text('types = { fprop = "mxfp8" }\n')
    (found,) = variants("", f"{own} with output_layer")
    assert found.rest["recipe"].output_layer
    assert found.words == ("--recipe", str(own), "--with", "output_layer")


def test_an_axis_takes_switches_and_texts_with_commas():
    switch = variants("linear_hifp8", axes=("tensor-scale=true,false",))
    forward = {"attention_gemms": "forward"}  # linear modes have no product of attention
    assert [one.rest for one in switch] == [{"tensor_scale": True} | forward, forward]
    late = "linear: mxfp4 until 0.9, then bf16"
    made = variants("linear_mxfp4", axes=(f"schedule=none|{late}", "exclude=none,output_layer"))
    assert [one.rest for one in made] == [
        forward,
        {"exclude": ("output_layer",)} | forward,
        {"schedule": (late,)} | forward,
        {"schedule": (late,), "exclude": ("output_layer",)} | forward,
    ]
    assert made[-1].name == (
        "linear_mxfp4_schedule-linear-mxfp4-until-0.9-then-bf16_exclude-output_layer"
    )
    assert made[-1].words[2:] == ("--schedule", late, "--exclude", "output_layer")


@pytest.mark.parametrize(
    ("modes", "recipes", "axis", "message"),
    [
        ("mxfp4", "", "colour=red", r"colour.*rounding"),
        ("mxfp4", "", "dump=1", r"dump.*rounding"),
        ("mxfp4", "", "rounding", "--axis rounding .*rounding=up,down"),
        ("mxfp4", "", "block=16,many", "--axis block=16,many .*'many'"),
        ("mxfp4", "", "tensor-scale=yes", "--axis tensor-scale=yes .*'yes'.*true or false"),
        ("", "nvfp4", "block=16", "--axis block=16 .*none"),
        ("bf16", "", "block=16", "--axis block=16 .* bf16"),
        ("", "nvfp4,nothing", "", "recipe .*'nothing'"),
        ("", "nvfp4 hadamard", "", "recipe .*'nvfp4 hadamard'"),
        ("", "nvfp4 without", "", "recipe .*'nvfp4 without'"),
        ("", "mxfp8 without hadamard", "", "recipe mxfp8 .*hadamard"),
    ],
)
def test_what_is_no_axis_or_recipe_is_refused(modes, recipes, axis, message):
    with pytest.raises(MqoError, match=message):
        variants(modes, recipes, (axis,) if axis else ())


@pytest.fixture
def mine():
    """A custom quantizer with an option of each kind."""
    declare(Plugin("mine", options={"bits": 3, "flag": True, "rule": "a"}))
    yield
    PLUGINS.clear()


@pytest.mark.usefixtures("mine")
def test_an_axis_may_be_an_option_of_a_quantizer_of_the_user():
    planned = variants("bf16,FA_mine,linear_mxfp8", axes=("mine.flag=true,false", "block=16,32"))
    assert [variant.name for variant in planned] == [
        "bf16",
        "FA_mine_mine.flag-true",
        "FA_mine_mine.flag-false",
        "linear_mxfp8_block-16",
        "linear_mxfp8_block-32",
    ]
    off = planned[2]
    assert off.rest == {"plugin_options": ("mine.flag=false",), "gemms": "fprop"}
    assert off.words == ("--quantization", "FA_mine", "--plugin-option", "mine.flag=false")


@pytest.mark.usefixtures("mine")
def test_equal_values_of_an_option_are_a_variant_and_letters_count():
    planned = variants("mine", axes=("mine.bits=4,04", "mine.rule=A|a|b,c"))
    assert [variant.rest["plugin_options"] for variant in planned] == [
        ("mine.bits=4", f"mine.rule={rule}") for rule in ("A", "a", "b,c")
    ]


@pytest.mark.usefixtures("mine")
def test_an_option_is_read_where_a_schedule_has_its_quantizer():
    late = "linear: mxfp4 until 2, then mine"
    planned = variants("linear_mxfp4", axes=(f"schedule=none|{late}", "mine.bits=3,4"))
    assert [variant.rest.get("plugin_options") for variant in planned] == [
        None,
        ("mine.bits=3",),
        ("mine.bits=4",),
    ]


@pytest.mark.usefixtures("mine")
@pytest.mark.parametrize(
    ("modes", "axes", "message"),
    [
        ("mine", ("mine.bit=3",), r"'mine\.bit'.*mine\.bits"),
        ("mine", ("other.bits=3",), r"'other\.bits'"),
        ("mine", ("mine.bits=3,x",), r"mine\.bits=x"),
        ("mine", ("mine.flag=yes",), r"mine\.flag=yes.*true or false"),
        ("mine", ("mine.bits",), "no values"),
        ("mine", ("mine.bits=3", "mine.bits=4"), r"two --axis of mine\.bits"),
        ("bf16,mxfp8", ("mine.bits=3",), "changes nothing"),
    ],
)
def test_an_option_that_a_quantizer_lacks_is_refused(modes, axes, message):
    with pytest.raises(MqoError, match=message):
        variants(modes, axes=axes)
