"""The quantizers of tools/mqo/quant/recipes train together, resume and replay to the last bit."""

from pathlib import Path

import pytest
from mqo.launch import evaluation
from mqo.launch.config import resolve
from mqo.launch.forward_pass import AS_TRAINED, SavedModel
from mqo.launch.rerun import BitEqual, rerun
from mqo.recipes import recipe as recipes

pytest.importorskip("torch")
from . import real_runs
from .real_runs import continued, losses, stats_of
from .vendored_tree import PROJECT

pytestmark = pytest.mark.slow

LAST, SAVED = 4, 2
FOLDER = PROJECT.root / "tools/mqo/quant/recipes"
# Rows of [operands] apply to layers without a rule: those of QuEST.
BLOCKS = ("averis", "ms_eden", "ue5m3", "four_over_six")
RULES = "".join(
    f'[[rules]]\nlayers = "linear:decoder.layers.{number}.*"\nquant_type = "{name}"\n'
    for number, name in enumerate(BLOCKS)
)
# QuEST's transform needs sizes that are multiples of 128. Those of latent attention are not.
ATTENTION = '[[rules]]\nlayers = "linear:decoder.layers.*.self_attention.*"\nquant_type = "ue5m3"\n'
FLAGS = (
    "--num-layers 5 --seq-length 64 --max-position-embeddings 64 "
    f"--micro-batch-size 2 --global-batch-size 4 --train-samples {4 * LAST} "
    f"--save-interval {SAVED} --eval-iters 1 --eval-interval 2"
).split()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A recipe that gives each block a quantizer, and the last one the recipe of QuEST."""
    text = (FOLDER / "quest.toml").read_text()
    names = ", ".join(f'"{FOLDER / name}.py"' for name in (*BLOCKS, "quest"))
    path = tmp_path_factory.mktemp("examples") / "examples.toml"
    path.write_text(
        text.replace('plugins = ["quest.py"]', f"plugins = [{names}]") + RULES + ATTENTION
    )
    return recipes.read(str(path))


def train(project, recipe, model, checkpoints: Path):
    cell = resolve(
        *(model, "wikipedia", "bf16", "smoke"),
        recipe=recipe,
        extra_flags=(*FLAGS, *MODELS[model]),
        checkpoint=checkpoints,
        allow_mostly_unquantized=True,
    )
    return real_runs.run(project, cell)


EXPERTS = (
    "--moe-layer-freq [0]*1+[1]*4 --num-experts 4 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 128 --moe-shared-expert-intermediate-size 256"
)
MODELS = {"llama32-1b": [], "deepseek2_lite": EXPERTS.split()}


@pytest.mark.parametrize(
    "model", [pytest.param("llama32-1b", marks=pytest.mark.heavy), "deepseek2_lite"]
)
def test_they_resume_and_replay_to_the_last_bit(checkout_with, vendored, recipe, model, tmp_path):
    project = checkout_with(runs=tmp_path / "runs")
    whole = train(project, recipe, model, tmp_path / "whole")
    half = continued(tmp_path / "whole", SAVED, tmp_path / "half")
    rest = train(project, recipe, model, half)
    assert [step for step, _ in losses(whole)[0]] == list(range(1, LAST + 1))
    assert losses(rest)[0] == losses(whole)[0][SAVED:]
    assert {row["quant_type"] for row in stats_of(whole)} == {*BLOCKS, "quest", "excluded"}
    words = evaluation.text(tokens=64)
    (own,) = evaluation.evaluate(vendored, [SavedModel.find(whole.root)], [AS_TRAINED], words)
    assert own.types["fprop"] == "quest" and own.tokens == 64
    result = rerun(project, whole, allow_versions=True, report=lambda text: None)
    assert result == BitEqual(result.run, LAST)
