"""The class of a model: by option, by the flag with a pattern, by the model's own pattern."""

import pytest
from mqo.errors import LayoutError, MqoError
from mqo.launch.command import flag_table
from mqo.launch.config import Cluster, block_layers, resolve
from mqo.launch.flags import shape_flags
from mqo.launch.hybrid import check_checkout
from mqo.launch.layout import check_layout
from mqo.launch.models import model_of
from mqo.matrix import tables
from mqo.matrix.layer_pattern import FLAG, PatternError
from mqo.recipes.recipe import read

GPT = "llama32-1b"
OWN = """train_sequence = 256
pattern = "*-|**E"
hidden_size = 64
ffn_hidden_size = 128
num_attention_heads = 4
num_query_groups = 2
vocab_size = 512
tied_embeddings = true
norm_epsilon = 1e-5
rotary_base = 10000

[moe]
dense_layers = 0
num_experts = 4
topk = 2
shared_experts = 0
expert_ffn_size = 64
aux_loss = 0.01
"""


def cell(model=GPT, training="smoke", flags=(), **rest):
    return resolve(model, "wikipedia", "bf16", training, extra_flags=tuple(flags), **rest)


def flags_of(config):
    return flag_table(shape_flags(config.experiment, config.placement.layout))


@pytest.mark.parametrize("name", tables.script_models())
@pytest.mark.parametrize("training", ["smoke", "standard"])
def test_the_class_changes_only_the_flags_of_the_layers(name, training):
    gpt, hybrid = (cell(name, training, model_class=kind) for kind in ("gpt", "hybrid"))
    ours, theirs = flags_of(hybrid), flags_of(gpt)
    pattern = ours.pop(FLAG)
    for flag in ("--num-layers", "--moe-layer-freq"):
        theirs.pop(flag, None)
    assert ours == theirs
    assert pattern == "".join(gpt.experiment.model.blocks)
    assert hybrid.experiment.model.num_layers == gpt.experiment.model.num_layers
    assert hybrid.experiment.model_name == f"{name}-hybrid"


def test_a_pattern_among_the_flags_changes_the_model():
    config = cell(flags=(FLAG, "*-*--", "--seed", "7"))
    experiment = config.experiment
    assert experiment.model.blocks == ("*-", "*--")
    assert experiment.model_name == f"{GPT}*"
    assert experiment.model_changes == {FLAG: "*-*--"}
    assert experiment.extra_flags == ("--seed", "7")
    assert flags_of(config)[FLAG] == "*-*--"
    assert cell(flags=(f"{FLAG}=*-*--",)).experiment.model == experiment.model


def test_stages_are_between_blocks():
    flags = (FLAG, "*-*-*-*-", "--pipeline-model-parallel-size", "2")
    config = cell(flags=flags, cluster=Cluster(nproc_per_node=2))
    check_layout(config)
    assert flags_of(config)[FLAG] == "*-*-|*-*-"


@pytest.mark.parametrize("stages", ["3", "4"])
def test_blocks_that_stages_cannot_share_are_refused(stages):
    flags = (FLAG, "*-*-*-*-*-*-", "--pipeline-model-parallel-size", stages)
    config = cell(flags=flags, cluster=Cluster(nproc_per_node=int(stages)))
    if stages == "3":
        check_layout(config)
    else:
        with pytest.raises(PatternError, match="6 blocks"):
            check_layout(config)


def test_first_and_last_blocks_of_a_recipe_are_layers_of_the_pattern(tmp_path):
    kept = {"first": 1, "last": 2, "quant_type": "none"}
    recipe = read("nvfp4").model_copy(update={"rules": ()})
    recipe = type(recipe).model_validate(recipe.model_dump() | {"rules": [kept]})
    config = cell(flags=(FLAG, "*-**-*--"), recipe=recipe)
    layers = [f"decoder.layers.{n}.*" for n in (0, 1, 3, 4, 5, 6, 7)]
    rows = [
        rule["layers"].removeprefix("linear:")
        for rule in config.quantization.recipe.rows(block_layers(config.experiment))["rules"]
    ]
    assert [row for row in rows if row.startswith("decoder")] == layers
    assert block_layers(config.experiment) == (range(2), range(2, 3), range(3, 5), range(5, 8))


@pytest.mark.parametrize(
    "flag",
    [
        *("--num-layers", "--moe-layer-freq", "--num-layers-per-virtual-pipeline-stage"),
        *("--pipeline-model-parallel-layout", "--decoder-first-pipeline-num-layers"),
        *("--mtp-num-layers", "--spec", "--no-rope-freq", "--mla-down-proj-fusion"),
    ],
)
def test_flags_that_a_hybrid_model_would_ignore_are_refused(flag):
    with pytest.raises(LayoutError, match=flag):
        cell(flags=(flag, "2"), model_class="hybrid")


def test_other_layers_classes_and_programs_are_refused(tmp_path):
    with pytest.raises(LayoutError, match="local layers"):
        cell(flags=("--transformer-impl", "transformer_engine"), model_class="hybrid")
    with pytest.raises(PatternError, match="--model-class"):
        cell(flags=(FLAG, "*-"), model_class="gpt")
    with pytest.raises(PatternError, match="Mamba"):
        cell(flags=(FLAG, "M-*-"))
    with pytest.raises(PatternError, match="no attention"):
        cell(flags=(FLAG, "+-+-"))
    for words in ((FLAG,), (f"{FLAG}=",)):
        with pytest.raises(PatternError, match="without layers"):
            cell(flags=words)
    with pytest.raises(PatternError, match="--megatron"):
        check_checkout(cell(model_class="hybrid").experiment.model, tmp_path)


@pytest.mark.parametrize("layers", [0, -1, 10**15])
def test_a_number_of_layers_is_refused_before_they_are_listed(tmp_path, layers):
    file = tmp_path / "own.toml"
    table, _ = OWN.split("[moe]")
    file.write_text(table.replace('pattern = "*-|**E"', f"num_layers = {layers}"), "utf-8")
    with pytest.raises(MqoError, match="num_layers"):
        model_of(str(file))


def test_a_model_of_the_user_has_a_pattern(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(OWN, encoding="utf-8")
    model, _ = model_of(str(file))
    assert model.num_layers == len(model.blocks) == 3
    config = cell(str(file), shrink=(1, 1))
    assert config.experiment.model_name == "own"
    assert flags_of(config)[FLAG] == "*-**E"
    with pytest.raises(PatternError, match="pattern of the model"):
        cell(str(file), shrink=(1, 1), model_class="gpt")


MAMBA = OWN.replace("*-|**E", "M-ME*-").replace(
    "[moe]",
    """[mamba]
num_heads = 32
head_dim = 16
num_groups = 4
state_dim = 64

[moe]""",
)


def test_a_model_with_mamba_layers_has_the_sizes_of_their_heads(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(MAMBA)
    given = {
        shrink: {
            name: value
            for name, value in flags_of(cell(str(file), shrink=shrink)).items()
            if "mamba" in name
        }
        for shrink in ((1, 1), (2, 1))
    }
    sizes = {"--mamba-head-dim": "16", "--mamba-state-dim": "64"}
    assert given[1, 1] == {"--mamba-num-heads": "32", "--mamba-num-groups": "4", **sizes}
    assert given[2, 1] == {"--mamba-num-heads": "16", "--mamba-num-groups": "2", **sizes}


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("num_groups = 4", "num_groups = 5", "num_groups = 5"),
        ("M-ME*-", "*-*E", "no Mamba"),
        ('pattern = "M-ME*-"', "num_layers = 2", "no pattern"),
    ],
)
def test_sizes_of_mamba_layers_that_do_not_fit_are_refused(tmp_path, old, new, named):
    file = tmp_path / "mine.toml"
    file.write_text(MAMBA.replace(old, new))
    with pytest.raises(MqoError, match=named):
        model_of(str(file))
