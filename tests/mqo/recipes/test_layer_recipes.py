"""Recipes whose rules give layers recipes of their own, and recipes with types for attention."""

import json
from itertools import pairwise, product

import pytest
from mqo.cli import app
from mqo.errors import MqoError
from mqo.launch.config import resolve
from mqo.launch.effects import NoEffectError, check_effects
from mqo.quant.config import parse
from mqo.quant.formats import SITES
from mqo.quant.layer_rules import PARTS
from mqo.recipes import recipe as recipes
from mqo.recipes.layers import compact, equal_layers
from typer.testing import CliRunner

LINEAR = ("fprop", "dgrad", "wgrad")
BLOCK = "decoder.layers.{}."
QKV, PROJ = "self_attention.linear_qkv", "self_attention.linear_proj"
FC1, FC2 = "mlp.linear_fc1", "mlp.linear_fc2"
OTHER = "cross_attention.linear"  # of none of the parts
CORE = "self_attention.core_attention"
MLA = [
    f"self_attention.linear_{n}" for n in ("q_proj", "q_down_proj", "kv_down_proj", "kv_up_proj")
]
EXPERT, SHARED = "mlp.experts.local_experts.3.linear_fc1", "mlp.shared_experts.linear_fc2"


def read(folder, text, name="mine.toml"):
    path = folder / name
    path.write_text(text)
    return recipes.read(str(path))


def run(recipe, model="llama32-1b", mode="bf16", **rest):
    return resolve(model, "wikipedia", mode, "tiny", recipe=recipe, **rest)


def options(recipe, **rest):
    config = run(recipe, **rest)
    return parse(config.quant_toml(config.quantization.types))


def specs(config, layer, sites=LINEAR):
    """Return how the operands of a layer are quantized."""
    return {
        (name, operand): config.operand_spec(name, operand, layer, config.asked[name])
        for name in sites
        for operand in (SITES[name].lhs, SITES[name].rhs)
    }


ATTENTION_RECIPES = ("sagebwd", "fp8-tensorwise-attention")
LINEAR_RECIPES = sorted({*recipes.names()} - {*ATTENTION_RECIPES})


# Each recipe around and within two others, and around and within its neighbors.
FEW = ("nvfp4", "mxfp4-backward")
PAIRS = {*product(LINEAR_RECIPES, FEW), *product(FEW, LINEAR_RECIPES)}
PAIRS |= {*pairwise(LINEAR_RECIPES), *pairwise(LINEAR_RECIPES[::-1])}


@pytest.mark.parametrize(("outer", "inner"), sorted(PAIRS))
def test_a_layer_with_a_recipe_has_all_of_it_and_nothing_else(tmp_path, outer, inner):
    """F36: a rule with a type once kept the tiles, rounding and transforms of the outer recipe."""
    text = recipes.path_of(outer).read_text()
    rule = f'[[rules]]\nlayers = "*.mlp.*"\nrecipe = "{inner}"\n'
    at = text.find("\n[[rules]]") if "\n[[rules]]" in text else len(text)
    layered = f"{text[:at]}\n{rule}{text[at:]}"
    published = {name: recipes.read(name) for name in (outer, inner)}
    if published[inner].types.fprop != "none" == published[outer].types.fprop:
        with pytest.raises(MqoError, match=r"quantizes fprop.* types\.fprop = 'mixed'"):
            read(tmp_path, layered)
        return
    config = options(read(tmp_path, layered))
    assert specs(config, BLOCK.format(5) + FC1) == published[inner].resolved()
    assert specs(config, BLOCK.format(5) + OTHER) == published[outer].resolved()
    assert specs(config, BLOCK.format(0) + FC1) == published[inner].resolved()  # the first rule


def test_the_shipped_rules_of_parts_are_for_their_layers():
    """Q, K and V in MXFP8 (arXiv 2607.24953); attention in bf16 (Nemotron 3)."""
    config = options(recipes.read("mxfp4-qkv-mxfp8"))
    published = recipes.read("mxfp8").resolved()
    for layer in (QKV, *MLA):
        assert specs(config, BLOCK.format(5) + layer) == published
    for layer in (PROJ, FC1, FC2, EXPERT, SHARED):
        found = specs(config, BLOCK.format(5) + layer)
        assert found == recipes.read("mxfp4-qkv-mxfp8").resolved()
    sixteen = ("--num-layers", "16")
    config = options(recipes.read("nvfp4-nemotron3"), extra_flags=sixteen)
    quantized = {
        (block, layer)
        for block in range(16)
        for layer in (QKV, *MLA, PROJ, FC1, FC2, EXPERT, SHARED)
        if not config.is_excluded("fprop", BLOCK.format(block) + layer)
    }
    assert quantized == {(n, one) for n in range(13) for one in (FC1, FC2, EXPERT, SHARED)}


ROWS = '"wgrad.x" = { source = "fprop", quant_type = "none" }'
INLINE = f"""
types = {{ fprop = "nvfp4", wgrad = "mxfp8" }}
[[rules]]
parts = ["fc2", "proj"]
recipe = "double"
[recipes.double]
types = {{ fprop = "mxfp4", wgrad = "mxfp4" }}
operands = {{ {ROWS} }}
"""


def test_a_table_of_the_same_file_and_another_file_are_recipes(tmp_path):
    config = options(read(tmp_path, INLINE))
    double = specs(config, BLOCK.format(3) + FC2, ("fprop", "wgrad"))
    assert {spec.spec.quant_type for spec in double.values()} == {"mxfp4", "none"}
    assert double["wgrad", "x"].source == "fprop"
    (tmp_path / "other").mkdir()
    read(
        tmp_path / "other", f'types = {{ fprop = "mxfp4", wgrad = "mxfp4" }}\n[operands]\n{ROWS}\n'
    )
    start, end = INLINE.index("recipe ="), INLINE.index("[recipes")
    named = INLINE[:start] + 'recipe = "other/mine.toml"\n'
    assert INLINE[start:end].strip() == 'recipe = "double"'
    from_file = options(read(tmp_path, named))
    assert specs(from_file, BLOCK.format(3) + FC2, ("fprop", "wgrad")) == double
    assert run(read(tmp_path, named)).quantization.name.startswith("mine recipe ")


@pytest.mark.parametrize(
    ("part", "layers"),
    [
        ("qkv", [QKV, *MLA, "self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"]),
        ("proj", [PROJ, "self_attn.o_proj"]),
        ("fc1", [FC1, EXPERT, "mlp.shared_experts.linear_fc1", "mlp.gate_proj"]),
        ("fc2", [FC2, SHARED, "mlp.down_proj"]),
        ("experts", [EXPERT, "mlp.experts.linear_fc2", "mlp.experts.7.down_proj"]),
        ("shared_experts", [SHARED, "mlp.shared_experts.up_proj"]),
    ],
)
def test_parts_are_layers_of_megatron_and_of_transformers(tmp_path, part, layers):
    text = f'types = {{ fprop = "mxfp4" }}\n[[rules]]\nparts = ["{part}"]\nquant_type = "mxfp8"\n'
    config = options(read(tmp_path, text))
    every = {QKV, *MLA, PROJ, FC1, FC2, EXPERT, SHARED, "mlp.router", "output_layer", *layers}
    ruled = {
        n for n in every if config.layer_type("fprop", BLOCK.format(1) + n, "mxfp4") == "mxfp8"
    }
    expected = {*layers} | {n for n in (EXPERT, SHARED) if n.endswith(part.replace("fc", "_fc"))}
    assert ruled == expected


def test_every_layer_of_a_block_is_a_part():
    """A part for each linear layer: PARTS cannot miss one that a model of the matrix has."""
    from mqo.quant.layer_rules import is_part

    for layer in (QKV, *MLA, PROJ, FC1, FC2, EXPERT, SHARED):
        assert is_part(BLOCK.format(0) + layer, PARTS)


def test_parts_and_ends_are_both_required(tmp_path):
    text = (
        'types = { fprop = "mxfp4", dgrad = "mxfp4", wgrad = "mxfp4" }\n'
        '[[rules]]\nparts = ["fc2"]\nfirst = 1\nlast = 2\nrecipe = "mxfp8"\n'
        '[[rules]]\nparts = ["fc2"]\nquant_type = "none"\n'
    )
    config = options(read(tmp_path, text), extra_flags=("--num-layers", "16"))
    types = {n: config.layer_type("fprop", BLOCK.format(n) + FC2, "mxfp4") for n in range(16)}
    assert {n for n, kind in types.items() if kind == "mxfp8"} == {0, 14, 15}
    assert {*types.values()} == {"mxfp8", "none"}
    assert config.layer_type("fprop", BLOCK.format(0) + FC1, "mxfp4") == "mxfp4"


@pytest.mark.parametrize("what", ['recipe = "nvfp4"', 'quant_type = "mxfp4"'])
def test_a_share_of_blocks_may_be_none_of_them(tmp_path, what):
    """A recipe that no layer has is not in quant.toml, where each one needs a rule."""
    recipe = read(tmp_path, f"{MX}[[rules]]\nlast = 0.1\n{what}\n")
    kinds = []
    for blocks in ("2", "16"):
        config = options(recipe, extra_flags=("--num-layers", blocks))
        layers = [BLOCK.format(n) + FC1 for n in range(int(blocks))]
        types = [config.layer_type("fprop", layer, "mxfp8") for layer in layers]
        kinds.append(types.count("mxfp8"))
    assert kinds == [2, 14]


MX = 'types = { fprop = "mxfp8", dgrad = "mxfp8", wgrad = "mxfp8" }\n'
RULE = '[[rules]]\nparts = ["qkv"]\n'


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (f"{MX}{RULE}", "either quant_type or recipe"),
        (f'{MX}{RULE}quant_type = "none"\nrecipe = "mxfp8"', "either quant_type or recipe"),
        (f'{MX}{RULE}recipe = "nvfp5"', "unknown recipe 'nvfp5'"),
        (f'{MX}{RULE}recipe = ""', "unknown recipe ''"),
        (f"{MX}{RULE}recipe = 3", "recipe"),
        (f'{MX}{RULE}recipe = "gone.toml"', "gone.toml"),
        (f'{MX}[[rules]]\nparts = ["router"]\nquant_type = "none"', "no quantization site"),
        (f'{MX}[[rules]]\nparts = ["qvk"]\nquant_type = "none"', "'qvk'"),
        (f'{MX}[[rules]]\nparts = "qkv"\nquant_type = "none"', "parts"),
        (f'{MX}{RULE}layers = "a"\nquant_type = "none"', "either layers, or parts"),
        (f'{MX}[recipes.idle]\ntypes = {{ fprop = "mxfp4" }}', "no rule has the recipe idle"),
        (f'{MX}{RULE}recipe = "a"\n[recipes.a]\ntypes = {{}}', "all types are 'none'"),
        (f'{MX}{RULE}recipe = "a"\n[recipes.a]\nrules = []', "recipes.a"),
        (
            f'{MX}{RULE}recipe = "a"\n[recipes.a]\ntypes = {{ fprop = "hif4" }}\n'
            'operands = { "fprop.x" = { tile = "square" } }',
            "recipe a: operands.fprop.x: hif4 has no square",
        ),
        (
            f'{MX}{RULE}recipe = "a"\n[recipes.a]\ntypes = {{ fprop = "mixed" }}',
            "no quant_type for fprop.x",
        ),
        (
            f'{MX}{RULE}recipe = "a"\n[recipes.a]\ntypes = {{ wgrad = "mxfp8" }}\n'
            f"operands = {{ {ROWS} }}",
            "types other than 'none' for fprop and wgrad",
        ),
        (
            f'{MX}{RULE}recipe = "a"\n[recipes.a]\ntypes = {{ qk = "mxfp8" }}\n',
            "quantizes qk, which is 'none'",
        ),
        (
            f'{MX}options = {{ save_activations = "packed" }}\n{RULE}recipe = "a"\n'
            '[recipes.a]\ntypes = { fprop = "mxfp8" }\n'
            'operands = { "fprop.x" = { gain = 0.5 } }',
            "save_activations",
        ),
    ],
)
def test_a_faulty_rule_is_refused(tmp_path, text, complaint):
    with pytest.raises(MqoError) as fault:
        read(tmp_path, text)
    assert complaint in str(fault.value)
    assert "mine.toml" in str(fault.value)


def test_an_option_of_a_rules_recipe_is_one_of_the_run(tmp_path):
    read(tmp_path, f"{MX}options = {{ block = 16 }}\n", "small.toml")
    with pytest.raises(MqoError, match=r"small\.toml of a rule has the option block = 16"):
        read(tmp_path, f'{MX}{RULE}recipe = "small.toml"\n')
    read(tmp_path, f'{MX}options = {{ block = 16 }}\n{RULE}recipe = "small.toml"\n')
    read(tmp_path, f'{MX}{RULE}recipe = "nvfp4"\n')  # its cache changes no value


def test_recipes_that_name_one_another_end(tmp_path):
    read(tmp_path, f"{MX}", "b.toml")
    recipe = read(tmp_path, f'{MX}{RULE}recipe = "b.toml"\n', "a.toml")
    (tmp_path / "b.toml").write_text(f'{MX}{RULE}recipe = "a.toml"\n')
    assert recipes.read(str(tmp_path / "a.toml")) == recipe  # types and operands alone


def test_a_rule_that_differs_in_rows_alone_changes_something(tmp_path):
    """The type is the same: only the scale rule of MXFP8's recipe differs."""
    layers = {site: [BLOCK.format(0) + FC1] for site in LINEAR}
    for inner, idle in (("mxfp8", False), ("same", True)):
        text = f'{MX}[[rules]]\nlayers = "*.mlp.*"\nrecipe = "{inner}"\n'
        text += f"[recipes.same]\n{MX}" if idle else ""
        config = run(read(tmp_path, text))
        types = config.quantization.types
        if idle:
            with pytest.raises(NoEffectError, match="changes nothing"):
                check_effects(config, types, layers)
        else:
            check_effects(config, types, layers)


def test_switches_change_the_recipes_of_rules_too(tmp_path):
    recipe = read(tmp_path, f'{MX}{RULE}recipe = "nvfp4"\n')
    assert recipe.ingredients == ("hadamard", "stochastic", "2d")
    plain = specs(options(recipes.changed(recipe, ["2d"], [])), BLOCK.format(3) + QKV)
    assert plain == recipes.read("nvfp4").without("2d").resolved()


def test_the_record_of_a_run_has_the_recipes(tmp_path):
    recipe = read(tmp_path, INLINE)
    config = run(recipe)
    assert type(config).model_validate_json(config.model_dump_json()) == config
    (tmp_path / "mine.toml").write_text(INLINE.replace('fprop = "mxfp4"', 'fprop = "mxfp6_e2m3"'))
    assert recipes.read(str(tmp_path / "mine.toml")).label != recipe.label


# -- attention -------------------------------------------------------------------------------------

ATTENTION = """
types = { fprop = "mxfp4", qk = "mxfp8", pv = "mixed" }
options = { smooth_key = true }
[operands]
"qk.key" = { scale_rule = "rceil" }
"pv.probs" = { quant_type = "mxfp8_e5m2" }
"pv.value" = { quant_type = "mxfp8" }
[[rules]]
first = 1
quant_type = "none"
"""


def test_attention_can_be_part_of_a_recipe(tmp_path):
    recipe = read(tmp_path, ATTENTION)
    config = run(recipe)
    assert config.quantization.types == {
        "fprop": "mxfp4",
        "dgrad": "none",
        "wgrad": "none",
        "qk": "mxfp8",
        "pv": "mixed",
    }
    chosen = options(recipe)
    core = specs(chosen, BLOCK.format(1) + CORE, ("qk", "pv"))
    kinds = {f"{site}.{operand}": spec.spec.quant_type for (site, operand), spec in core.items()}
    assert kinds == {
        "qk.query": "mxfp8",
        "qk.key": "mxfp8",
        "pv.probs": "mxfp8_e5m2",
        "pv.value": "mxfp8",
    }
    assert core["qk", "key"].spec.scale_rule == "rceil"
    assert core["qk", "key"].smooth
    for site, layer in (("qk", CORE), ("pv", CORE), ("fprop", FC1)):  # a kept block keeps all
        assert chosen.is_excluded(site, BLOCK.format(0) + layer)


BACKWARD = """
types = { qk = "mxint8", pv = "mxint8", qk_recompute = "mxint8", dv = "mxint8", dq = "mixed" }
options = { smooth_key = true }
[operands]
"dq.ds" = { quant_type = "mxfp8_e5m2" }
"dq.key" = { quant_type = "mxint8", rounding = "stochastic" }
"""


def test_products_of_attentions_backward_pass_have_types_and_rows(tmp_path):
    recipe = read(tmp_path, BACKWARD)
    types = run(recipe).quantization.types
    assert types == dict.fromkeys(("fprop", "dgrad", "wgrad"), "none") | {
        **dict.fromkeys(("qk", "pv", "qk_recompute", "dv"), "mxint8"),
        "dq": "mixed",
    }
    core = specs(options(recipe), CORE, types)
    rows = {key: (spec.spec.quant_type, spec.spec.rounding) for key, spec in core.items()}
    assert rows["dq", "ds"] == ("mxfp8_e5m2", "nearest-even")
    assert rows["dq", "key"] == ("mxint8", "stochastic")
    assert core["qk_recompute", "key"].smooth
    with pytest.raises(MqoError, match="--attention-gemms"):
        run(recipe, attention_gemms="all")


@pytest.mark.parametrize("mode", ["FA_mxfp8", "FA_mxfp4"])
def test_only_one_of_mode_and_recipe_quantizes_attention(tmp_path, mode):
    with pytest.raises(MqoError, match="both quantize attention"):
        run(read(tmp_path, ATTENTION), mode=mode)


@pytest.mark.parametrize("inner", ATTENTION_RECIPES)
def test_a_rule_cannot_turn_on_attention(tmp_path, inner):
    text = f"""
types = {{ fprop = "mxfp8", dgrad = "mxfp8", wgrad = "mxfp8" }}
options = {{ smooth_key = true }}
[[rules]]
last = 1
recipe = "{inner}"
"""
    with pytest.raises(MqoError, match=r"quantizes qk.* types\.qk = 'mixed'"):
        read(tmp_path, text)


def test_transforms_and_gains_of_attention_are_refused(tmp_path):
    for row in ("hadamard = 16", "gain = 0.5"):
        text = ATTENTION.replace('scale_rule = "rceil"', row)
        with pytest.raises(MqoError, match="qk"):
            read(tmp_path, text)


# -- how each layer of a model is quantized --------------------------------------------------------


def test_equal_layers_are_together_and_unquantized_ones_last(tmp_path):
    config = options(read(tmp_path, ATTENTION))
    blocks = [BLOCK.format(n) for n in range(4)]
    linear = [f"{block}{layer}" for block in blocks for layer in (FC1, FC2)]
    layers = {"fprop": [*linear, "output_layer"], "qk": [f"{block}{CORE}" for block in blocks]}
    mlp, core, plain = equal_layers(config, layers)
    assert compact(mlp.layers) == [f"decoder.layers.1-3.{layer}" for layer in (FC1, FC2)]
    assert {row["type"] for row in mlp.rows} == {"mxfp4"}
    assert compact(core.layers) == [f"decoder.layers.1-3.{CORE}"]
    assert [row["operand"] for row in core.rows] == ["query", "key"]
    assert plain.rows == () and "output_layer" in plain.layers


def test_names_are_shortened_to_ranges():
    names = [f"a.{n}.b.{m}.c" for n in (0, 1, 2, 4, 7, 8) for m in (0, 1)]
    assert compact([*names, "head", "a.3.d"]) == ["a.0-2,4,7-8.b.*.c", "head", "a.3.d"]


@pytest.mark.slow  # it runs the patched source once
def test_a_model_is_shown_layer_by_layer(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(INLINE)
    words = ["recipe", "show", str(path), "--model", "deepseek2_lite"]
    text = CliRunner().invoke(app, words)
    assert text.exit_code == 0, text.output
    assert max(map(len, text.output.splitlines())) <= 80
    groups = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)["layers"]
    layers = [layer for group in groups for layer in group["layers"]]
    assert len(layers) == len({*layers}) and "output_layer" in layers
    double = next(g for g in groups if any(row.get("source") for row in g["rows"]))
    ends = {layer.rpartition(".")[2] for layer in double["layers"]}
    assert ends == {"linear_proj", "linear_fc2"}
