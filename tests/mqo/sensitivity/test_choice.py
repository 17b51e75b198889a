"""The recipe that a command line chooses."""

import pytest
from mqo.errors import MqoError, UnknownNameError
from mqo.launch.own_types import NO_OWN_TYPES, OwnTypes
from mqo.sensitivity.choice import chosen_recipe, passes


def test_a_mode_quantizes_all_gemms_and_the_output_layer():
    recipe = chosen_recipe("FA_linear_mxfp4", None, (), ())
    assert recipe.types.by_site() | {"pv": "none"} == {
        **dict.fromkeys(("fprop", "dgrad", "wgrad", "qk"), "mxfp4"),
        "pv": "none",
    }
    assert recipe.output_layer


def test_blocks_that_a_recipe_keeps_at_the_ends_are_measured():
    recipe = chosen_recipe(None, "nvfp4-nemotron3", (), ())
    assert [rule.parts for rule in recipe.rules] == [("qkv", "proj")]
    quant = passes(recipe, NO_OWN_TYPES)
    assert [rule["layers"] for rule in quant.rows["rules"]] == ["linear:*", "linear:output_layer"]
    assert quant.types == dict.fromkeys(("fprop", "dgrad", "wgrad"), "nvfp4")
    assert quant.options == {"cache_weights": True}


@pytest.mark.parametrize(
    ("mode", "recipe", "without", "text"),
    [
        (None, None, (), "--recipe"),
        ("mxfp4", "nvfp4", (), "either"),
        ("bf16", None, (), "quantizes nothing"),
        ("mxfp4", None, ("2d",), "without a recipe"),
        (None, "hif4", ("2d",), "no 2d"),
    ],
)
def test_what_cannot_be_measured_is_refused(mode, recipe, without, text):
    with pytest.raises(MqoError, match=text):
        chosen_recipe(mode, recipe, without, ())


@pytest.mark.parametrize(("mode", "recipe"), [("mxfp5", None), (None, "nvfp5")])
def test_an_unknown_name_is_refused(mode, recipe):
    with pytest.raises(UnknownNameError):
        chosen_recipe(mode, recipe, (), ())


def test_a_rule_for_parts_of_the_ends_is_refused(tmp_path):
    file = tmp_path / "own.toml"
    rule = '[[rules]]\nfirst = 1\nparts = ["qkv"]\nquant_type = "mxfp8"\n'
    file.write_text(f'types = {{ fprop = "mxfp4" }}\n{rule}')
    with pytest.raises(MqoError, match="ends"):
        chosen_recipe(None, str(file), (), ())


def test_a_quantizer_that_is_no_type_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text('@quantizer("mine")\ndef mine(x, context):\n    return x\n')
    own = OwnTypes.from_options(plugins=[file])
    with pytest.raises(MqoError, match="changes nothing"):
        passes(chosen_recipe("mxfp4", None, (), ()), own)
