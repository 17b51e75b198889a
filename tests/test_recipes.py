"""Recipes in real runs: what switches change in a first step, and which layers stay out."""

import pytest
from mqo.errors import RunError
from mqo.launch import run as launch
from mqo.launch.config import resolve
from mqo.recipes import recipe as recipes

pytest.importorskip("torch")
from safetensors.torch import load_file

from .real_runs import Starter, losses, stats_of
from .vendored_tree import PROJECT as PROJECT

SIZES = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 "
    "--global-batch-size 4 --train-samples 4 --eval-iters 0"
)


@pytest.fixture(scope="module")
def start(tmp_path_factory, checkout_with):
    return Starter(checkout_with(runs=tmp_path_factory.mktemp("recipes") / "runs"))


@pytest.fixture(scope="module")
def first_step(start):
    """{operand: what was given}, and {operand: (signal, noise)}, of a recipe's first step."""

    def run(recipe):
        folder = start("bf16", recipe=recipe, flags=tuple(SIZES.split()), dump=(1,), every=1)
        given = load_file(folder.dumps / "iteration_1_rank_0.safetensors")
        rows = [row for row in stats_of(folder) if row["measured"]]
        place = "{site}/{layer}/{operand}"
        return given, {place.format(**row): (row["signal"], row["noise"]) for row in rows}

    return run


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("nvfp4", marks=pytest.mark.slow),
        pytest.param("mxfp8", marks=pytest.mark.heavy),
    ],
)
def test_grouped_experts_have_the_losses_and_records_of_experts_one_by_one(start, recipe):
    runs = []
    for flags in ((), ("--moe-grouped-gemm",)):
        options = {"model": "deepseek2_lite", "training": "tiny", "flags": flags}
        runs.append(start("bf16", recipe=recipe, **options))
    one_by_one, grouped = runs
    expected, found = ([loss for _, loss in losses(run)[0]] for run in runs)
    assert found == pytest.approx(expected, rel=1e-6)
    assert called(grouped) == called(one_by_one)


def called(run):
    """How often each operand of each layer was quantized."""
    return {(r["site"], r["layer"], r["operand"]): r["calls"] for r in stats_of(run)}


@pytest.mark.slow
def test_without_the_transform_wgrad_alone_is_another_is_another(first_step):
    """Wgrad's result reaches no other operand of the first step."""
    given, measured = first_step("nvfp4")
    without, changed = first_step("nvfp4 without hadamard")
    assert given.keys() == without.keys() == measured.keys() == changed.keys()
    assert all(given[name].equal(without[name]) for name in given)
    differs = {name for name in measured if measured[name] != changed[name]}
    assert differs == {name for name in measured if name.startswith("wgrad/")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("switch", "operands"),
    [
        ("2d", {"fprop/{}/weight", "dgrad/{}/weight"}),
        ("stochastic", {"dgrad/{}/grad", "wgrad/{}/grad"}),
    ],
)
def test_a_switch_changes_the_operands_that_it_names(first_step, switch, operands):
    """In the layer whose inputs are still the same: the first one of forward, or of backward."""
    given, measured = first_step("nvfp4 without kept-blocks")
    without, changed = first_step(f"nvfp4 without kept-blocks without {switch}")
    same = {name for name in given if given[name].equal(without[name])}
    differs = {name for name in same if measured[name] != changed[name]}
    assert differs
    layers = {name.split("/")[1] for name in differs}
    assert differs <= {name.format(layer) for name in operands for layer in layers}
    first = "decoder.layers.0.self_attention.linear_qkv"
    layer = first if switch == "2d" else "decoder.layers.3.mlp.linear_fc2"
    assert {name.format(layer) for name in operands} <= differs


@pytest.mark.slow
def test_kept_blocks_stay_out_and_the_others_do_not(start, first_step):
    _, measured = first_step("nvfp4")
    assert {name.split("/")[1].split(".")[2] for name in measured} == {"0", "1", "2"}


@pytest.mark.slow
def test_a_recipe_that_leaves_most_unquantized_is_refused(checkout_with, tmp_path):
    path = tmp_path / "few.toml"
    path.write_text(
        'types = { fprop = "mxfp8" }\n[[rules]]\nlayers = "linear:*.mlp.*"\nquant_type = "none"\n'
    )
    project, recipe = checkout_with(runs=tmp_path / "runs"), recipes.read(str(path))
    flags = tuple(SIZES.split())
    config = resolve("llama32-1b", "wikipedia", "bf16", "smoke", recipe=recipe, extra_flags=flags)
    with pytest.raises(RunError, match="few quantizes"):
        launch.run(project, config, report=lambda text: None)
