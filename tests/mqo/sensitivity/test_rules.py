"""The recipe that keeps the most sensitive parts: how many, and that trainings take it."""

import pytest
from mqo.errors import MqoError
from mqo.launch.config import resolve
from mqo.launch.effects import resolved_config
from mqo.launch.plugins import plugins_of
from mqo.quant.formats import LINEAR
from mqo.quant.recipe_files import names
from mqo.quant.subsets import KINDS, PATTERNS, Change, quantized_layers, subsets
from mqo.recipes.recipe import read
from mqo.sensitivity import rules
from mqo.sensitivity.choice import chosen_recipe
from mqo.sensitivity.measure import Sensitivity

LAYERS = {
    LINEAR: [
        f"decoder.layers.{block}.{part}"
        for block in (0, 1)
        for part in ("self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
    ]
    + ["output_layer"]
}


def ranked(*weights, total=None):
    changes = tuple(
        Change(f"layer{n}", (), w, 0.0, 0.0, 1.0 / (n + 1)) for n, w in enumerate(weights)
    )
    everything = Change("everything", (), total or sum(weights), 0.0, 0.0, 1.0)
    more = {"loss": 1.0, "tokens": 2, "window": 2, "text": (), "iteration": 1, "dtype": "float32"}
    names = {"checkpoint": "one", "quantization": "mxfp4", "by": "layer", "rank": "gradient"}
    return Sensitivity(**names, **more, seconds=0.0, everything=everything, changes=changes)


@pytest.mark.parametrize(
    ("weights", "share", "numbers"),
    [
        ((10, 20, 30, 40), 0.1, [0]),
        ((10, 20, 30, 40), 0.59, [0, 1]),
        ((10, 20, 30, 40), 0.6, [0, 1, 2]),
        ((40, 30, 20, 10), 0.2, [2]),  # the first ones do not fit
        ((10, 50, 10, 30), 0.3, [0, 2]),
        ((0, 0, 50, 50), 0.1, [0, 1]),
    ],
)
def test_the_most_sensitive_that_fit_into_the_share_are_kept(weights, share, numbers):
    result = ranked(*weights)
    chosen = rules.kept(result, share)
    assert chosen == [result.changes[number] for number in numbers]
    assert sum(change.weights for change in chosen) <= share * sum(weights)


def test_a_share_too_small_for_any_is_refused():
    with pytest.raises(MqoError, match=r"has 40\.0%"):
        rules.kept(ranked(60, 40), 0.2)


@pytest.mark.parametrize("text", ["20", "0%", "100%", "-5%", "a%", "nan%", "", "1e1%", "٢٠%"])
def test_a_share_is_a_percentage(text):
    with pytest.raises(MqoError, match="percentage"):
        rules.share_of(text)


def test_shares_have_decimals_and_spaces():
    assert [rules.share_of(text) for text in ("20%", " 2.5 % ")] == [0.2, 0.025]


def test_only_whole_layers_are_kept():
    for kind in KINDS:
        if kind in PATTERNS:
            rules.check_kind(kind)
        else:
            with pytest.raises(MqoError, match="block"):
                rules.check_kind(kind)


@pytest.mark.parametrize("name", names())
def test_each_recipe_is_read_back_with_its_new_rules(name, tmp_path):
    with_ = ("output_layer",) if read(name).types.of_linear else ()
    recipe = chosen_recipe(None, name, (), with_)
    plugins = plugins_of((), (), recipe)
    first = Change("decoder.layers.1.*", (), 1, 0.0, 0.0, 1.0)
    written = rules.keeping(recipe, [first])
    rules.write(written, plugins, 'a "summary"', tmp_path / "kept.toml")
    again = read(str(tmp_path / "kept.toml"))
    same = {"types", "operands", "rules", "recipes", "options", "output_layer", "plugin_options"}
    assert again.model_dump(include=same) == written.model_dump(include=same)
    assert again.plugins == recipe.plugins
    assert again.summary == 'a "summary"'


@pytest.mark.parametrize(("mode", "recipe"), [("linear_mxfp4", None), (None, "mxfp4-qkv-mxfp8")])
@pytest.mark.parametrize("by", PATTERNS)
def test_a_run_with_the_recipe_quantizes_all_other_layers(mode, recipe, by, tmp_path):
    measured = chosen_recipe(mode, recipe, (), ("output_layer",) if recipe else ())
    before = resolved(measured)
    for member in subsets(before, by, LAYERS):
        chosen = [Change(member.name, member.layers, 1, 0.0, 0.0, 1.0)]
        rules.write(rules.keeping(measured, chosen), (), "", tmp_path / "kept.toml")
        after = quantized_layers(resolved(read(str(tmp_path / "kept.toml"))), LAYERS)
        assert {*quantized_layers(before, LAYERS)} - {*after} == {*member.layers}


def resolved(recipe):
    config = resolve("llama32-1b", "wikipedia", "bf16", "tiny", recipe=recipe)
    return resolved_config(config, config.quantization.types)
