"""Recipes: what is in the files, what the switches change, and what becomes of it in a run."""

import tomllib

import pytest
from mqo.errors import MqoError, UnknownNameError
from mqo.launch.config import resolve
from mqo.launch.options import quant_toml
from mqo.quant.config import parse
from mqo.quant.formats import chosen_types
from mqo.quant.plugins import PLUGINS
from mqo.quant.recipe import Recipe
from mqo.quant.recipe_operands import INGREDIENTS, KEPT, LINEAR_SITES
from mqo.quant.recipe_rules import Rule
from mqo.recipes import recipe as recipes
from mqo.recipes.show import resolved

# What facts say of each recipe: {operand: type, tile, rounding, Hadamard transform}.
E4M3, E5M2 = ("fp8_tensor_e4m3", "tensor"), ("fp8_tensor_e5m2", "tensor")
MX8, HIF4, ROW, SQUARE = ("mxfp8", "1x32"), ("hif4", "1x64"), ("nvfp4", "1x16"), ("nvfp4", "16x16")
B128, W128 = ("fp8_block", "1x128"), ("fp8_block", "128x128")
DRAWN, BACKWARD = "stochastic", ("mxfp4", "1x32", "stochastic", "64 random")
NEAREST = "nearest-even"
MX4, TILE32, U4 = ("mxfp4", "1x32"), ("mxfp4", "32x32"), ("ufp4", "1x16")
NVFP4 = [
    *(ROW, SQUARE, (*ROW, DRAWN), SQUARE),
    *((*ROW, DRAWN, "16 fixed"), (*ROW, NEAREST, "16 fixed")),
]
U4_NEAREST, U4_DRAWN = ((*U4, rounding, "16 fixed") for rounding in (NEAREST, DRAWN))
UE, UE_SQUARE = ("ue5m3", "1x16", NEAREST), ("ue5m3", "16x16", NEAREST)
TILE128 = ("int8_block", "128x128")
UE_DRAWN = ("ue5m3_stochastic", "1x16", DRAWN)
PUBLISHED = {
    "mxfp8": [MX8] * 6,
    "fp8-tensorwise": [E4M3, E4M3, E5M2, E4M3, E5M2, E4M3],
    "fp8-blockwise": [B128, W128, B128, W128, B128, B128],
    "nvfp4": NVFP4,
    "mxfp4-backward": [("none",), ("none",), *[BACKWARD] * 4],
    "hif4": [(*HIF4, "nearest-away")] * 6,
    "quest": [("quest", "own", "nearest-even", "128 none")] * 2 + [("none",)] * 4,
    "averis": [("averis", "own", DRAWN)] * 6,
    "ms-eden": [ROW, ROW, *[("ms_eden", "1x128", DRAWN, "128 random")] * 4],
    "mxfp4-hadamard": [(*MX4, NEAREST, "16 none")] * 6,
    "mxfp4-h32": [MX4, TILE32, (*MX4, DRAWN), TILE32, *[(*MX4, NEAREST, "32 fixed")] * 2],
    "mxfp4-qkv-mxfp8": [TILE32, TILE32, (*TILE32, DRAWN), TILE32, (*TILE32, DRAWN), TILE32],
    "nvfp4-nemotron3": NVFP4,
    "nvfp4-four-over-six": NVFP4,
    "nvfp4-ue5m3": [(kind.replace("nvfp4", "nvfp4_ue5m3"), *rest) for kind, *rest in NVFP4],
    "ue5m3": [UE, UE_SQUARE, UE_DRAWN, UE_SQUARE, UE_DRAWN, UE],
    "mxfp8-dequantized": [MX8, MX8, *[("none",)] * 4],
    "nvfp4-dequantized": [ROW, SQUARE, *[("none",)] * 4],
    "ufp4": [U4_NEAREST, U4_NEAREST, U4_DRAWN, U4_NEAREST, U4_DRAWN, U4_NEAREST],
    "sagebwd": [
        *[("none",)] * 6,
        *(TILE128, TILE128, ("int8_block", "1x128"), TILE128),  # P per token
        *[TILE128] * 4,
        *(("none",), ("none",)),  # dP
        *[TILE128] * 4,
    ],
    "fp8-tensorwise-attention": [
        *(E4M3, E4M3, E5M2, E4M3, E5M2, E4M3),
        *[E4M3] * 6,
        *(E4M3, E5M2, E5M2, E4M3, E5M2, E4M3, E5M2, E4M3),
    ],
}
# The scale rule and the gain of MX formats; both are equal for all operands of a recipe.
SCALES = {
    "mxfp8": ("rceil", 1.0),
    "mxfp8-dequantized": ("rceil", 1.0),
    "mxfp4-backward": ("rceil", 0.75),
    "mxfp4-hadamard": ("even", 1.0),
    "mxfp4-h32": ("rceil", 0.75),
    "mxfp4-qkv-mxfp8": ("rceil", 1.0),
}


def cells(row):
    if row["type"] == "none":
        return ("none",)
    return row["type"], row["tile"], row["rounding"], row["hadamard"]


def table(recipe):
    return {f"{row['site']}.{row['operand']}": cells(row) for row in resolved(recipe)}


def run(recipe, model="llama32-1b", mode="bf16", **rest):
    return resolve(model, "wikipedia", mode, "tiny", recipe=recipe, **rest)


def test_every_recipe_is_as_published():
    assert set(recipes.names()) == set(PUBLISHED)
    for name, rows in PUBLISHED.items():
        found = list(table(recipes.read(name)).values())
        for one, published in zip(found, rows, strict=True):
            assert one[: len(published)] == published
            rest = one[len(published) :]
            assert all(cell in ("", "nearest-even") for cell in rest), name


@pytest.mark.parametrize("name", PUBLISHED)
def test_scale_rules_and_gains_are_as_published(name):
    rows = [row for row in resolved(recipes.read(name)) if row["type"].startswith("mx")]
    assert {(row["scale_rule"], row["gain"]) for row in rows} == {*[SCALES.get(name)] * len(rows)}


@pytest.mark.parametrize("name", ["mxfp8-dequantized", "nvfp4-dequantized"])
def test_backward_of_dequantized_values_reads_those_of_the_forward_pass(name):
    sources = {f"{r['site']}.{r['operand']}": r.get("source") for r in resolved(recipes.read(name))}
    assert {place for place, source in sources.items() if source} == {"dgrad.weight", "wgrad.x"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_a_family_and_one_line_on_the_loss(name):
    recipe = recipes.read(name)
    assert recipe.family in ("MXFP8", "FP8", "INT8", "MXFP4", "NVFP4", "other 4-bit")
    assert "\n" not in recipe.published
    assert recipe.published.endswith((")", "."))


@pytest.mark.parametrize("key", ["family", "published"])
def test_only_a_recipe_of_the_user_may_leave_a_text_out(key):
    keys = recipes.read("mxfp8").model_dump(include={"types", "family", "published"})
    del keys[key]
    with pytest.raises(ValueError, match=f"{key} is missing"):
        Recipe.from_table("mxfp8", keys)
    assert Recipe.from_table("mine.toml", keys).own


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_run_holds_the_table_and_its_literals(name):
    recipe = recipes.read(name)
    config = run(recipe)
    types = config.quantization.types
    assert types == chosen_types(recipe.types.model_dump())
    assert recipe.types.of_attention == ((types["qk"], types["pv"]) != ("none", "none"))
    options = parse(config.quant_toml(types))
    assert options.asked == types
    for row in resolved(recipe):
        how = options.operand_spec(row["site"], row["operand"], "a", types[row["site"]])
        assert how.spec.quant_type == row["type"]
        assert how.gain == row.get("gain", 1.0)
        if row["site"] in LINEAR_SITES and recipe.types.of_linear:
            assert options.layer_type(row["site"], "output_layer", "mxfp8") == "none"


# -- switches --------------------------------------------------------------------------------------

NVFP4_RECIPES = ("nvfp4", "nvfp4-nemotron3", "nvfp4-four-over-six", "nvfp4-ue5m3")
WEIGHTS, OF_WGRAD = {"fprop.weight", "dgrad.weight"}, {"wgrad.grad", "wgrad.x"}
GRADIENTS = {"dgrad.grad", "wgrad.grad"}
BACKWARD_OPERANDS = {"dgrad.grad", "dgrad.weight", *OF_WGRAD}
EVERY = {"fprop.x", "fprop.weight", *BACKWARD_OPERANDS}
CHANGED = {
    **{(name, "hadamard"): OF_WGRAD for name in NVFP4_RECIPES},
    **{(name, "stochastic"): GRADIENTS for name in NVFP4_RECIPES},
    **{(name, "2d"): WEIGHTS for name in NVFP4_RECIPES},
    ("fp8-blockwise", "2d"): WEIGHTS,
    ("mxfp4-backward", "hadamard"): BACKWARD_OPERANDS,
    ("quest", "hadamard"): {"fprop.x", "fprop.weight"},
    ("ms-eden", "hadamard"): BACKWARD_OPERANDS,
    ("mxfp4-backward", "stochastic"): BACKWARD_OPERANDS,
    ("mxfp4-hadamard", "hadamard"): EVERY,
    ("mxfp4-h32", "hadamard"): OF_WGRAD,
    ("mxfp4-h32", "stochastic"): {"dgrad.grad"},
    ("mxfp4-h32", "2d"): WEIGHTS,
    ("mxfp4-qkv-mxfp8", "stochastic"): GRADIENTS,
    ("mxfp4-qkv-mxfp8", "2d"): EVERY,
    ("ue5m3", "2d"): WEIGHTS,
    ("nvfp4-dequantized", "2d"): {"fprop.weight"},
    ("sagebwd", "2d"): {
        *("qk.query", "qk.key", "pv.value", "qk_recompute.query", "qk_recompute.key"),
        *("dv.probs", "dv.grad", "dq.ds", "dq.key", "dk.ds", "dk.query"),
    },
    ("ufp4", "hadamard"): EVERY,
    ("ufp4", "stochastic"): GRADIENTS,
}


@pytest.mark.parametrize(("name", "ingredient"), CHANGED)
def test_a_switch_changes_the_operands_that_it_names(name, ingredient):
    recipe = recipes.read(name)
    without = recipe.without(ingredient)
    before, after = table(recipe), table(without)
    assert {place for place in before if before[place] != after[place]} == CHANGED[name, ingredient]
    assert ingredient not in without.ingredients
    at = {"hadamard": 3, "stochastic": 2, "2d": 1}[ingredient]
    for place in CHANGED[name, ingredient]:
        kept = [i for i in range(4) if before[place][i] == after[place][i]]
        assert kept == [i for i in range(4) if i != at]
    assert without.label == f"{name} recipe without {ingredient}"


def test_all_switches_are_those_that_the_recipes_name():
    found = {(name, i) for name in recipes.names() for i in recipes.read(name).ingredients}
    assert found == {*CHANGED, *((name, KEPT) for name in NVFP4_RECIPES)}
    assert {ingredient for _, ingredient in found} == set(INGREDIENTS)


def test_the_head_cannot_be_added_to_a_recipe_without_linear_layers():
    recipe = recipes.read("sagebwd")
    assert [rule.layers for rule in recipe.all_rules([range(1)])] == []
    with pytest.raises(MqoError, match="sagebwd quantizes no linear layer"):
        recipes.changed(recipe, (), ("output_layer",))


def test_without_stochastic_rounding_there_is_no_gain():
    rows = resolved(recipes.read("mxfp4-backward").without("stochastic"))
    assert {row.get("gain", 1.0) for row in rows} == {1.0}


@pytest.mark.parametrize("ingredient", ["stochastic", "hadamard", "2d"])
def test_a_gain_that_operands_rounded_to_nearest_have_is_part_of_the_scale(ingredient):
    rows = resolved(recipes.read("mxfp4-h32").without(ingredient))
    assert {row["gain"] for row in rows} == {0.75}


def test_only_a_gain_of_operands_rounded_stochastically_goes_with_the_rounding(tmp_path):
    path = tmp_path / "mine.toml"
    drawn = 'rounding = "stochastic", gain ='
    path.write_text(
        'types = { fprop = "mxfp4", dgrad = "mxfp4" }\n[operands]\n"fprop.x" = { gain = 0.75 }\n'
        f'"dgrad.grad" = {{ {drawn} 0.75 }}\n"dgrad.weight" = {{ {drawn} 0.5 }}\n'
    )
    recipe = recipes.read(str(path)).without("stochastic")
    gains = {f"{row['site']}.{row['operand']}": row.get("gain") for row in resolved(recipe)}
    assert gains["fprop.x"] == gains["dgrad.grad"] == 0.75
    assert gains["dgrad.weight"] == 1.0
    assert recipe.ingredients == ()


def test_kept_blocks_and_the_output_layer_are_rules():
    recipe = recipes.read("nvfp4")
    kept = [f"linear:decoder.layers.{block}.*" for block in (0, 14, 15)]
    blocks = [[block] for block in range(16)]
    rows = list(recipe.all_rules(blocks))
    assert [row.layers for row in rows] == [*kept, "linear:output_layer"]
    assert {row.quant_type for row in rows} == {"none"}
    changed = recipes.changed(recipe, [KEPT], ["output_layer"])
    assert list(changed.all_rules(blocks)) == []
    assert changed.label == "nvfp4 recipe without kept-blocks with output_layer"


@pytest.mark.parametrize(
    ("count", "blocks"), [(2, []), (8, [7]), (16, [0, 14, 15]), (62, [0, 1, *range(54, 62)])]
)
def test_kept_shares_are_rounded(count, blocks):
    (rule,) = recipes.read("nvfp4").rules
    assert rule.blocks(count) == blocks


def test_nemotron_3_keeps_its_share_of_layers_and_the_projections_of_attention():
    """14 of 88 layers of Super, and 16 of 108 of Ultra within a layer."""
    last, parts = recipes.read("nvfp4-nemotron3").rules
    assert last.blocks(88) == [*range(74, 88)]
    assert len(last.blocks(108)) in (16, 17)
    assert (parts.parts, parts.quant_type, parts.is_of_ends) == (("qkv", "proj"), "none", False)


@pytest.mark.parametrize(
    ("ends", "blocks"),
    [
        ({"first": 0.6, "last": 0.6}, [0, 1, 2, 3]),
        ({"first": 1, "last": 2}, [0, 2, 3]),
        ({"last": 9}, [0, 1, 2, 3]),
    ],
)
def test_ends_are_shares_or_numbers_of_blocks(ends, blocks):
    assert Rule(quant_type="mxfp8", **ends).blocks(4) == blocks


def test_kept_blocks_are_of_the_layers_that_the_users_flags_say():
    config = run(recipes.read("nvfp4"), extra_flags=("--num-layers", "8"))
    assert "decoder.layers.7." in config.quant_toml({})
    assert "decoder.layers.15." not in config.quant_toml({})


# -- files of the user's ---------------------------------------------------------------------------

OWN = """
types = { fprop = "mixed", wgrad = "mxfp8" }
[operands]
"fprop.x" = { quant_type = "none" }
"fprop.weight" = { quant_type = "nvfp4", tile = "square" }
[[rules]]
layers = "linear:decoder.layers.*.mlp.*"
quant_type = "mxfp6_e2m3"
"""


def test_a_file_is_a_recipe(tmp_path):
    path = tmp_path / "my own.toml"
    path.write_text(OWN)
    recipe = recipes.read(str(path))
    assert recipe.name == "my own"
    assert table(recipe)["fprop.weight"][:2] == ("nvfp4", "16x16")
    options = parse(run(recipe).quant_toml({}))
    mlp = "decoder.layers.1.mlp.linear_fc1"
    assert options.operand_type("fprop", "x", mlp, "mixed") == "mxfp6_e2m3"
    assert options.operand_type("fprop", "x", "a", "mixed") == "none"
    assert options.operand_type("dgrad", "grad", mlp, "none") == "none"


MX = 'types = { fprop = "mxfp8" }\n'


def row(text, kind="mxfp8"):
    """A recipe with one type, and a row of [operands]."""
    return f'types = {{ fprop = "{kind}" }}\n[operands]\n{text}'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("types = {}", "all types are 'none'"),
        ("", "types: Field required"),
        ('types = { fprop = "fp5" }', "unknown quant type 'fp5'"),
        ('types = { head = "mxfp8" }', "types.head"),
        (f"{MX}[[rules]]\nfirst = 1.5\nquant_type = 'none'", "rules.0.first: 1.5 "),
        (f"{MX}[[rules]]\nfirst = -1\nquant_type = 'none'", "rules.0.first: -1 "),
        (f"{MX}[[rules]]\nquant_type = 'none'", "rules.0: a rule needs either layers"),
        (f"{MX}[[rules]]\nlayers = 'a'\nlast = 1\nquant_type = 'none'", "rules.0: a rule needs"),
        ('types = { fprop = "mxfp8" }\nform = 1', "form"),
        (row('"qk.key" = {}'), "operands: 'qk.key' "),
        (row('"fprop.x" = { tile = "oval" }'), "oval"),
        (row('"fprop.x" = { gain = 3.0 }'), "gain 3.0"),
        (row('"fprop.x" = { hadamard = 16 }'), "the same hadamard and signs"),
        (row('"fprop.x" = { tile = "square" }', "hif4"), "fprop.x: hif4 has no square"),
        (
            row('"fprop.x" = { scale_rule = "rceil" }', "nvfp4"),
            "fprop.x: nvfp4 has the scale rules amax, four-over-six-mse, four-over-six-mae",
        ),
        (
            row('"fprop.x" = { scale_rule = "amax" }', "mxfp4"),
            "fprop.x: mxfp4 has the scale rules floor, rceil, ceil, even",
        ),
        (
            row('"fprop.x" = { scale_rule = "amax" }', "fp8_block"),
            "fprop.x: fp8_block has only one scale rule",
        ),
        (row('"dgrad.grad" = { gain = 0.5 }'), "dgrad.grad: gain "),
        (row('"fprop.x" = { signs = "fixed" }'), "signs"),
        ("types = ", "Invalid value"),
        ('types = { wgrad = "mixed" }', "no quant_type for wgrad.grad"),
        (f"{MX}[[rules]]\nlayers = 'a'\nquant_type = 'mixed'", "mixed"),
        (f"{MX}[[rules]]\nlayers = 'qk:a'\nquant_type = 'none'", "'qk:a' is for qk"),
        (f"{MX}[[rules]]\nlayers = 'attention:a'\nquant_type = 'none'", "is for attention"),
        (f"{MX}[[rules]]\nfirst = nan\nquant_type = 'none'", "rules.0.first: nan "),
        (f"{MX}[[rules]]\nfirst = true\nquant_type = 'none'", "rules.0.first: True "),
        (f"{MX}[[rules]]\nfirst = '1'\nquant_type = 'none'", "rules.0.first: '1' "),
        (f"{MX}name = '../../evil'", "name cannot be set"),
        (f"{MX}changes = ['with magic']", "changes cannot be set"),
        (f"a = {'[' * 5000}", "`mqo recipe show nvfp4`"),
        (
            f"{MX}options = {{ save_activations = 'packed' }}\n[operands]\n"
            "'fprop.x' = { gain = 0.5 }",
            "save_activations",
        ),
        (f"{MX}options = {{ blok = 3 }}", "blok"),
        (f"{MX}options = {{ block = 33 }}", "33"),
        (f"{MX}options = {{ every = 3 }}", "every"),
        ('types = { fprop = "mxfp8" }\n[[rules]]\nlayers = "a"\nquant_type = "fp5"', "fp5"),
    ],
)
def test_a_faulty_file_is_refused(tmp_path, text, complaint):
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(MqoError) as fault:
        recipes.read(str(path))
    assert complaint in str(fault.value)
    assert str(path) in str(fault.value)


def test_unknown_names_list_the_valid_ones(tmp_path):
    with pytest.raises(UnknownNameError, match="nvfp4"):
        recipes.read("nvfp5")
    with pytest.raises(MqoError, match=r"/none\.toml .*nvfp4"):
        recipes.read(str(tmp_path / "none.toml"))
    with pytest.raises(UnknownNameError, match="hadamard"):
        recipes.changed(recipes.read("nvfp4"), ["hadamart"], [])
    with pytest.raises(UnknownNameError, match="output_layer"):
        recipes.changed(recipes.read("nvfp4"), [], ["head"])
    with pytest.raises(MqoError) as caught:
        recipes.changed(recipes.read("hif4"), ["hadamard"], [])
    assert str(caught.value) == (
        "The recipe hif4 has no hadamard to leave out. Expected: no --without: this recipe has no "
        "ingredient to leave out."
    )


# -- beside modes and options ----------------------------------------------------------------------


def test_attention_is_the_modes():
    config = run(recipes.read("nvfp4"), mode="FA_mxfp8")
    assert config.quantization.types["qk"] == "mxfp8"
    assert config.quantization.name == "nvfp4 recipe FA_mxfp8"
    assert " " not in config.title


@pytest.mark.parametrize("mode", ["linear_mxfp8", "mxfp8", "source"])
def test_a_mode_of_linear_layers_is_refused_beside_it(mode):
    with pytest.raises(MqoError, match="recipe nvfp4"):
        run(recipes.read("nvfp4"), mode=mode)


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("nvfp4", {"gemms": "all"}),
        ("nvfp4", {"rounding": "stochastic"}),
        ("mxfp8", {"scale_rule": "floor"}),
    ],
)
def test_options_that_the_recipe_has_are_refused_beside_it(name, rest):
    with pytest.raises(MqoError, match=name):
        run(recipes.read(name), **rest)


def test_options_that_it_does_not_have_reach_the_run():
    options = parse(run(recipes.read("nvfp4"), scale_rule="rceil").quant_toml({}))
    assert options.scale_rule == "rceil"
    assert options.cache_weights
    off = run(recipes.read("nvfp4"), cache_weights=False)
    assert not parse(off.quant_toml({})).cache_weights


def test_it_survives_the_runs_own_record(tmp_path):
    config = run(recipes.changed(recipes.read("nvfp4"), ["2d"], []))
    assert type(config).model_validate_json(config.model_dump_json()) == config


def test_rows_of_quant_toml_are_toml():
    rows = {"fprop.x": {"tile": "square", "hadamard": 16, "gain": 0.75}, "fprop.weight": {}}
    rule = {"layers": 'a"b', "quant_type": "none"}
    found = tomllib.loads(quant_toml({}, {}, operands=rows, rules=[rule]))
    assert found["operands"] == {"fprop.x": rows["fprop.x"]}
    assert found["rules"] == [rule]


def test_files_of_one_name_are_told_apart_and_switches_have_one_order(tmp_path):
    labels = set()
    for kind in ("mxfp8", "mxfp4"):
        path = tmp_path / "mine.toml"
        path.write_text(f'types = {{ fprop = "{kind}" }}\n')
        labels.add(run(recipes.read(str(path))).quantization.name)
    assert len(labels) == 2
    nvfp4 = recipes.read("nvfp4")
    one = recipes.changed(nvfp4, ["2d", "hadamard"], [])
    assert one == recipes.changed(nvfp4, ["hadamard", "2d"], [])


def test_a_bare_pattern_is_of_the_linear_sites(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(f'{MX}[[rules]]\nlayers = "decoder.layers.0.*"\nquant_type = "mxfp4"\n')
    config = run(recipes.read(str(path)), mode="FA_mxfp8")
    options = parse(config.quant_toml(config.quantization.types))
    layer = "decoder.layers.0.self_attention.core_attention"
    assert options.operand_type("qk", "key", layer, "mxfp8") == "mxfp8"
    assert options.operand_type("fprop", "x", layer, "mxfp8") == "mxfp4"


def test_codes_that_nothing_makes_are_refused():
    with pytest.raises(MqoError, match="mxfp4-backward"):
        run(recipes.read("mxfp4-backward"), save_activations="packed")


# -- custom quantizers ------------------------------------------------------------------------

MINE = """
from helper_of_recipe import FACTOR
from mqo.quant import quantizer


@quantizer("mine", options={"gain": 2.0})
def mine(x, context):
    return FACTOR * context.options["gain"] * x
"""


@pytest.fixture
def own(tmp_path):
    """A recipe with a quantizer, which has a helper."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    (folder / "helper_of_recipe.py").write_text("FACTOR = 5\n")
    (folder / "mine.py").write_text(MINE)
    path = folder / "own.toml"
    path.write_text(
        'types = { fprop = "mine", wgrad = "mxfp8" }\nplugins = ["mine.py"]\n'
        "[plugin_options]\nmine = { gain = 3.0 }\n"
    )
    return path


def test_a_program_that_loads_a_recipe_runs_its_quantizers(own):
    torch = pytest.importorskip("torch")
    from mqo.quant.backend import fake_quantize

    recipe = Recipe.load(own)
    spec = recipe.resolved()["fprop", "weight"].spec
    assert fake_quantize(torch.ones(4), spec).eq(15).all()
    assert recipe == recipes.read(str(own))
    assert PLUGINS["mine"].function is not None  # reading it again forgets nothing


def test_a_run_with_the_recipe_keeps_its_quantizers(own):
    config = run(recipes.read(str(own)), mode="FA_mine")
    (plugin,) = config.quantization.plugins
    assert (plugin.name, plugin.source) == ("mine", own.with_name("mine.py"))
    assert plugin.options == {"gain": 3.0}
    name, text = config.quantization.name, config.quant_toml(config.quantization.types)
    assert plugin.label in name and config.quantization.all_types >= {"mine", "mxfp8"}
    PLUGINS.clear()
    options = parse(text)
    for place in (("fprop", "x"), ("qk", "key")):
        assert dict(options.operand_spec(*place, "a", "mine").spec.options) == {"gain": 3.0}
    PLUGINS.clear()
    again = type(config).model_validate_json(config.model_dump_json())
    assert again == config and again.quantization.name == name


@pytest.mark.parametrize(("text", "options"), [("4", {"gain": 4.0}), ("2", {})])
def test_options_of_the_command_override_those_of_the_recipe(own, text, options):
    """Also by the quantizer's default."""
    config = run(recipes.read(str(own)), plugin_options=[f"mine.gain={text}"])
    assert config.quantization.plugins[0].options == options


def test_a_rule_may_have_a_quantizer(own):
    own.write_text(
        f'plugins = ["mine.py"]\n{MX}[[rules]]\nlayers = "decoder.layers.0.*"\n'
        'quant_type = "mine"\n'
    )
    config = run(recipes.read(str(own)))
    assert [plugin.name for plugin in config.quantization.plugins] == ["mine"]
    options = parse(config.quant_toml(config.quantization.types))
    assert options.operand_type("fprop", "x", "decoder.layers.0.a", "mxfp8") == "mine"


@pytest.mark.parametrize("options", ["{ gian = 3.0 }", "{ gain = '3' }"])
def test_invalid_options_of_a_quantizer_that_only_a_rule_has_are_refused(own, options):
    own.write_text(
        f'plugins = ["mine.py"]\n{MX}[plugin_options]\nmine = {options}\n'
        '[[rules]]\nlayers = "a"\nquant_type = "mine"\n'
    )
    with pytest.raises(MqoError, match="mine"):
        run(recipes.read(str(own)))
