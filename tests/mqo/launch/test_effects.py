"""Options that change nothing are refused, for every option, type and kind of mode."""

import pytest
from mqo.errors import MqoError
from mqo.launch.config import resolve
from mqo.launch.effects import NoEffectError, check_effects, differing_lines
from mqo.launch.options import OPTIONS
from mqo.launch.variants import GemmChoice, variants
from mqo.matrix import tables
from mqo.recipes import recipe as recipes
from mqo.sweep.configs import jobs

FAMILIES = ("linear_{}", "FA_{}", "FA_linear_{}", "{}", "pv_{}")
# {option: (values, the formats that read it, the sites that have to have such a type)}
ANY = tuple(tables.quant_types())
MX = ("mxfp8", "mxfp4", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxint8")
READ_BY = {
    "block": ((16, 64), MX, tables.SITES),
    "scale_rule": (("floor", "rceil"), MX, tables.SITES),
    "rounding": (("nearest-even", "stochastic"), ANY, tables.SITES),
    "overflow": (("saturate", "inf"), ("hifp8",), tables.SITES),
    "save_activations": (("full", "packed"), ANY, ("fprop",)),
    "tensor_scale": ((True,), ("hifp8",), tables.SITES),
    "smooth_key": ((True,), ANY, ("qk",)),
    "unnormalized_probs": ((True,), ANY, ("pv",)),
    "seed": ((0, 1), (), ()),
    "cache_weights": ((True,), ANY, ("fprop", "dgrad")),
    "every": ((0, 50), ANY, tables.SITES),
    "gradient_noise": ((True,), ANY, ("wgrad",)),
    "dump": (((1,),), ANY, tables.SITES),
    "exclude": ((("linear:*.0.*",),), ANY, ("fprop", "dgrad", "wgrad")),
    "include": ((("linear:*.0.*",),), ANY, ("fprop", "dgrad", "wgrad")),
}


def made(mode, training="tiny", **rest):
    return resolve("llama32-1b", "wikipedia", mode, training, **rest)


def check(config, layers=None):
    check_effects(config, config.quantization.types, layers)


def test_a_scale_rule_is_refused_if_no_type_has_it():
    for mode, rule, kinds in (
        ("linear_nvfp4", "rceil", "mxfp8, mxfp4, mxfp8_e5m2, mxfp6_e2m3, mxfp6_e3m2 or mxint8"),
        ("linear_mxfp4", "four-over-six-mse", "nvfp4 or nvfp4_ue5m3"),
        ("linear_fp4_ue5m3", "amax", "nvfp4 or nvfp4_ue5m3"),
    ):
        with pytest.raises(NoEffectError, match=f"--scale-rule {rule}") as error:
            check(made(mode, scale_rule=rule))
        assert error.value.expected.startswith(kinds)
    check(made("linear_nvfp4", scale_rule="four-over-six-mse"))
    check(made("linear_nvfp4", scale_rule="amax"))


def test_every_option_that_acts_through_an_operand_is_enumerated():
    assert {n for n, o in OPTIONS.items() if o.table != "run"} == {*READ_BY}


@pytest.mark.parametrize("option", READ_BY)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quant_type", ANY)
def test_an_option_is_taken_exactly_where_something_reads_it(quant_type, family, option):
    values, kinds, sites = READ_BY[option]
    mode = family.format(quant_type)
    for value in values:
        config = made(mode, **{option: value})
        types = config.quantization.types
        # 'fp8_tensor' and the like are families of formats: their members decide.
        if quant_type in kinds and any(types[site] != "none" for site in sites):
            check(config)
        else:
            with pytest.raises(NoEffectError, match=OPTIONS[option].flag):
                check(config)


@pytest.mark.parametrize("option", READ_BY)
def test_nothing_reads_an_option_of_an_unquantized_run(option):
    for value in READ_BY[option][0]:
        with pytest.raises(NoEffectError, match=f"^{OPTIONS[option].flag} "):
            check(made("bf16", **{option: value}))


def test_a_seed_is_read_by_random_draws():
    check(made("linear_mxfp4", rounding="stochastic", seed=3))
    check(made("bf16", recipe=recipes.read("nvfp4"), seed=3))
    with pytest.raises(NoEffectError, match="--quant-seed 3"):
        check(made("bf16", recipe=recipes.read("mxfp8"), seed=3))


@pytest.mark.parametrize("mode", ["bf16", "FA_mxfp8", "qk_pv_nvfp4"])
def test_backward_gemms_need_a_type_of_linear_layers(mode):
    with pytest.raises(NoEffectError, match="--gemms all"):
        check(made(mode, gemms="all"))
    check(made("linear_mxfp8", gemms="all"))


@pytest.mark.parametrize("mode", ["bf16", "linear_mxfp8"])
def test_backward_products_of_attention_need_a_type_of_attention(mode):
    with pytest.raises(NoEffectError, match="--attention-gemms all"):
        check(made(mode, attention_gemms="all"))
    check(made("pv_mxfp8", attention_gemms="all"))


def test_a_schedule_has_to_change_a_type_within_the_training():
    for late in ("mxfp8 until 1000, then bf16", "mxfp8 until 4, then mxfp8", "mxfp8"):
        with pytest.raises(NoEffectError, match=r"schedule of qk .* 8 steps"):
            check(made("FA_mxfp8", schedule=(f"qk: {late}",)))
    check(made("FA_mxfp8", schedule=("qk: mxfp8 until 4, then bf16",)))
    # An option may be for a later type alone.
    later = ("qk: none until 3, then mxfp8",)
    check(made("bf16", schedule=later, smooth_key=True))


@pytest.mark.parametrize("name", recipes.names())
def test_the_recipes_hold_nothing_without_effect(name):
    check(made("bf16", recipe=recipes.read(name)))


def test_an_option_beside_a_recipe_is_for_its_types():
    with pytest.raises(NoEffectError, match="--block 32"):
        check(made("bf16", recipe=recipes.read("nvfp4"), block=32))
    check(made("bf16", recipe=recipes.read("mxfp8"), block=64))


LAYERS = dict.fromkeys(
    ("fprop", "dgrad", "wgrad"), ("output_layer", "decoder.layers.0.fc1", "decoder.layers.1.fc1")
)


def test_a_pattern_has_to_change_a_layer(tmp_path):
    check(made("linear_mxfp8", exclude=("output_layer",)), LAYERS)
    nvfp4 = recipes.read("nvfp4")
    with pytest.raises(NoEffectError, match="--exclude output_layer"):
        check(made("bf16", recipe=nvfp4, exclude=("output_layer",)), LAYERS)
    own = tmp_path / "own.toml"
    own.write_text(
        'types = { fprop = "mxfp8" }\n[[rules]]\nlayers = "*.0.*"\nquant_type = "mxfp4"\n'
        '[[rules]]\nlayers = "*.0.fc1"\nquant_type = "none"\n'
    )
    with pytest.raises(NoEffectError, match=r"'\*\.0\.fc1' in the recipe own "):
        check(made("bf16", recipe=recipes.read(str(own))), LAYERS)


def test_an_included_pattern_has_to_change_a_layer():
    check(made("linear_mxfp8", include=("*.0.*",)), LAYERS)
    for patterns in (("*",), ("*.0.*", "*.0.fc1")):
        with pytest.raises(NoEffectError, match="--include"):
            check(made("linear_mxfp8", include=patterns), LAYERS)


@pytest.mark.parametrize(
    "patterns",
    [
        {"include": ("qk:*",)},
        {"exclude": ("linear:*",)},
        {"include": ("*.0.*",), "exclude": ("*",)},
    ],
)
def test_a_type_whose_layers_are_all_left_out_is_refused(patterns):
    attention = {"qk": ("decoder.layers.0.core", "decoder.layers.1.core")}
    with pytest.raises(NoEffectError, match="fprop"):
        check(made("FA_linear_mxfp8", **patterns), LAYERS | attention)


def test_a_variant_that_an_axis_does_not_touch_runs_once_under_its_plain_name():
    found = variants("bf16,linear_nvfp4,linear_mxfp8", axes=("block=16,32",))
    assert [one.name for one in found] == [
        "bf16",
        "linear_nvfp4",
        "linear_mxfp8_block-16",
        "linear_mxfp8_block-32",
    ]
    found = variants("linear_mxfp4", axes=("rounding=nearest-even,stochastic", "seed=1,2"))
    assert [one.name for one in found] == [
        "linear_mxfp4_rounding-nearest-even",
        "linear_mxfp4_rounding-stochastic_seed-1",
        "linear_mxfp4_rounding-stochastic_seed-2",
    ]


@pytest.mark.parametrize("axis", ["block=16,32", "tensor-scale=true,false", "smooth-key=true"])
def test_an_axis_that_touches_no_variant_is_refused(axis):
    with pytest.raises(MqoError, match=axis):
        variants("bf16,linear_nvfp4", axes=(axis,))


def test_what_a_sweep_asks_of_all_runs_has_to_touch_one():
    def made_jobs(modes, **rest):
        found = jobs("llama32-1b", "wikipedia", modes, "tiny", **rest)
        for job in found:
            check(job.config)
        return [job.config.quantization for job in found]

    plain, linear = made_jobs(
        "bf16,linear_mxfp8", gemms=GemmChoice("all"), exclude=("linear:*.0.*",)
    )
    assert (plain.gemms, plain.options) == ("fprop", {})
    assert (linear.gemms, linear.options) == ("all", {"exclude": ["linear:*.0.*"]})
    with pytest.raises(MqoError, match="--gemms all"):
        made_jobs("bf16,FA_mxfp8", gemms=GemmChoice("all"))
    with pytest.raises(MqoError, match="--attention-gemms all"):
        made_jobs("bf16,linear_mxfp8", gemms=GemmChoice(attention="all"))
    for name in ("exclude", "include"):
        with pytest.raises(MqoError, match=f"--{name} pv"):
            made_jobs("bf16,FA_mxfp8", **{name: ("pv:*",)})
    # Without its pattern linear_mxfp8 would quantize all layers.
    mixed = jobs("llama32-1b", "wikipedia", "bf16,FA_mxfp8,linear_mxfp8", "tiny", include=("qk:*",))
    assert [job.config.quantization.options for job in mixed] == [
        {},
        *([{"include": ["qk:*"]}] * 2),
    ]


RULED = (
    'types = { fprop = "nvfp4", wgrad = "nvfp4" }\n[operands]\n'
    '"wgrad.grad" = { rounding = "stochastic", hadamard = 16 }\n"wgrad.x" = { hadamard = 16 }\n'
    '[[rules]]\nlayers = "*.0.*"\nquant_type = "mxfp8"\n'
)


def test_layers_that_differ_are_shown_with_all_choices(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(RULED)
    recipe = recipes.read(str(own))
    config = made("bf16", recipe=recipe)
    lines = differing_lines(config, config.quantization.types, LAYERS)
    assert lines == [
        "nvfp4 1x16 nearest-even in 1 of 2 layers: fprop.x, fprop.weight",
        "mxfp8 1x32 nearest-even floor in 1 of 2 layers: fprop.x, fprop.weight, wgrad.grad, "
        "wgrad.x",
        "nvfp4 1x16 stochastic hadamard 16 fixed in 1 of 2 layers: wgrad.grad",
        "nvfp4 1x16 nearest-even hadamard 16 fixed in 1 of 2 layers: wgrad.x",
    ]
    (rule,) = recipe.rules
    assert recipe.ruled(rule) == ["mxfp8 1x32 nearest-even floor"]
    assert (
        differing_lines(made("linear_mxfp8"), made("linear_mxfp8").quantization.types, LAYERS) == []
    )
