"""Real runs of a HybridModel with Mamba-2 layers, on the functions of mqo.megatron.mamba."""

import functools
import json

import pytest
from mqo.launch.config import Cluster, resolve
from mqo.recipes.recipe import read
from mqo.runs import TRAIN_LOSS

pytest.importorskip("torch")
pytest.importorskip("einops")

from . import real_runs
from .real_runs import NORM, SHORT_STEPS, continued, deviation
from .vendored_tree import PROJECT as PROJECT

# Its parts and their halves are blocks of 16 and squares of 16.
MODEL = """
pattern = "M-M-*-"
hidden_size = 64
ffn_hidden_size = 128
num_attention_heads = 4
num_query_groups = 2
vocab_size = 4096
tied_embeddings = true
norm_epsilon = 1e-5
rotary_base = 10000
train_sequence = 80
[mamba]
num_heads = 32
head_dim = 8
num_groups = 2
state_dim = 16
"""
STEPS = 6
MAMBA = [f"decoder.layers.{n}.mixer.{part}_proj" for n in (0, 2) for part in ("in", "out")]
LINEAR = ("fprop", "dgrad", "wgrad")
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
STAGES = "--pipeline-model-parallel-size 3"
CONTEXT = "--context-parallel-size 2"
DATA = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
SHORT = "--seq-length 64 --max-position-embeddings 64"


@pytest.fixture(scope="module")
def train(tmp_path_factory, checkout_with):
    """A function that trains a model, the small one unless `size` names another and its shrink."""
    folder = tmp_path_factory.mktemp("mamba")
    project = checkout_with(runs=folder / "runs")
    small = folder / "small.toml"
    small.write_text(MODEL)

    def train(recipe=None, flags="", processes=1, *, size=None, coverage=False, **rest):
        model, shrink = size or (str(small), (1, 1))
        length = f"--micro-batch-size 2 --global-batch-size 4 --train-samples {4 * STEPS}"
        cell = resolve(
            *(model, "wikipedia", "bf16", "smoke"),
            extra_flags=tuple(f"{length} --eval-iters 0 {flags}".split()),
            cluster=Cluster(nproc_per_node=processes),
            recipe=recipe and read(recipe),
            shrink=shrink,
            **rest,
        )
        return real_runs.run(project, cell, coverage=coverage)

    return train


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param("nvfp4", marks=pytest.mark.slow),
        pytest.param("mxfp8", marks=pytest.mark.heavy),
    ],
)
def test_a_recipe_quantizes_the_projections_and_resumes_bit_for_bit(train, tmp_path, recipe):
    train = functools.partial(train, size=("nemotron-h-8b", (32, 5)))
    flags = f"{SHORT} --save-interval {STEPS // 2}"
    whole = train(recipe, flags, checkpoint=tmp_path / "whole")
    losses = whole.read_metrics()[TRAIN_LOSS]
    assert len(losses) == STEPS and losses[-1][1] < losses[0][1]
    ran = {(r["layer"], r["site"]) for r in real_runs.stats_of(whole) if r["quant_type"] == recipe}
    assert {(layer, site) for layer in MAMBA for site in LINEAR} <= ran
    folder = continued(tmp_path / "whole", STEPS // 2, tmp_path / "halfway")
    resumed = train(recipe, flags, checkpoint=folder)
    assert resumed.read_metrics()[TRAIN_LOSS] == losses[STEPS // 2 :]


@pytest.fixture(scope="module")
def started(train, tmp_path_factory):
    """A function that trains from one checkpoint; without flags only once for each recipe."""
    start = tmp_path_factory.mktemp("start") / "checkpoint"
    train(flags="--lr 0 --min-lr 0 --train-samples 4", checkpoint=start)
    loaded = f"--load {start} --finetune --no-load-optim --no-load-rng {SHORT_STEPS}"

    @functools.cache
    def started(recipe, flags="", processes=1):
        return train(recipe, f"{loaded} {flags}", processes)

    return started


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        pytest.param(TENSOR, 2, id="tensor"),
        pytest.param(STAGES, 3, id="stages"),
        pytest.param(CONTEXT, 2, id="context"),
        # No code of Mamba layers: test_parallelism.py has it with other layers.
        pytest.param(DATA, 2, id="data", marks=pytest.mark.heavy),
    ],
)
def test_a_layout_trains_as_one_process(started, flags, processes):
    runs = started(None, flags, processes), started(None)
    assert deviation(*runs, TRAIN_LOSS) < 1e-5
    assert deviation(*runs, NORM) < 1e-5


@pytest.mark.slow
def test_a_recipe_trains_over_tensor_ranks_as_in_one_process(started):
    """Ranks draw for the gradients of their shards; roundings tip over from the second step on."""
    runs = started("nvfp4", TENSOR, 2), started("nvfp4")
    assert deviation(*runs, TRAIN_LOSS, steps=1) < 1e-4
    assert deviation(*runs, TRAIN_LOSS) < 1e-2
    assert deviation(*runs, NORM) < 5e-2


@pytest.mark.slow
def test_recomputed_layers_have_the_same_bits(started):
    flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    runs = started("nvfp4", flags), started("nvfp4")
    assert [deviation(*runs, name) for name in (TRAIN_LOSS, NORM)] == [0, 0]


@pytest.mark.slow
def test_coverage_counts_the_scan_as_work_without_a_site(train):
    run = train("nvfp4", "--seq-length 256 --max-position-embeddings 256", coverage=True)
    products = json.loads(run.coverage.read_text())["products"]
    of_layers = {name: [p for p in products if p["layer"] == name] for name in MAMBA}
    assert all([p["gemm"] for p in rows] == list(LINEAR) for rows in of_layers.values())
    scan = [p for p in products if p["layer"] == "decoder.layers.0.mixer"]
    forward = [p for p in scan if p["gemm"] == "bmm"]
    assert {p["quant_type"] for p in scan} == {None}
    # Scores, their product with the inputs, the states of the chunks, and what these give.
    tokens, chunk, heads, width, groups, state = 2 * 256, 128, 32, 8, 2, 16
    per_token = chunk * (groups * state + heads * width) + 2 * heads * width * state
    assert sum(p["flops"] for p in forward) == 2 * tokens * per_token
    assert sum(p["flops"] for p in scan) == 3 * 2 * tokens * per_token
