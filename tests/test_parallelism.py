"""Parallel layouts against one process: one checkpoint, the same tokens, ten steps, real runs.

docs/parallelism.md says what is promised, and what was measured.
"""

from dataclasses import dataclass

import pytest
from mqo.launch.config import Cluster, resolve
from mqo.quant.recipe_files import names
from mqo.recipes.recipe import read
from mqo.runs import TRAIN_LOSS

pytest.importorskip("torch")
from safetensors.torch import load_file

from . import real_runs
from .real_runs import EXPERTS, NORM, RECOMPUTED, SHORT_STEPS, deviation, in_pattern
from .vendored_tree import PROJECT as PROJECT

STEPS = 10
SIZES = (
    "--num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 "
    f"--global-batch-size 4 --train-samples {4 * STEPS} --lr 1e-4 --min-lr 1e-5 --eval-iters 0"
)
# Fewer groups than heads are no part of its attention.
LATENT = (
    f"{SIZES.replace('--num-query-groups 2 ', '')} --moe-layer-freq [0]*1+[1]*3 "
    "--moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64 --kv-lora-rank 32 "
    "--qk-head-dim 32 --qk-pos-emb-head-dim 32 --v-head-dim 32"
)
# Whose shards hold whole blocks of 128.
WIDE = SIZES.replace(
    "--hidden-size 64 --ffn-hidden-size 128", "--hidden-size 256 --ffn-hidden-size 512"
)
MODELS = {
    "dense": ("llama32-1b", SIZES),
    "hybrid": ("llama32-1b", SIZES.replace("--num-layers 4", "--hybrid-layer-pattern *-*-*-*-")),
    "wide": ("llama32-1b", WIDE),
    "experts": ("llama32-1b", f"{SIZES} {EXPERTS}"),
    "latent": ("deepseek2_lite", LATENT),
}

NONE = dict.fromkeys(("fprop", "dgrad", "wgrad", "qk", "pv"), "none")
ALL = dict.fromkeys(NONE, "mxfp8")
NO_WGRAD = ALL | {"wgrad": "none"}


@dataclass(frozen=True)
class Layout:
    """Processes, and upstream's flags that share the work out among them."""

    processes: int
    flags: str


ONE = Layout(1, "")
DATA = Layout(2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")
# What a data-parallel rank does in one micro-batch, it does in two.
ACCUMULATED = Layout(2, f"{DATA.flags} --micro-batch-size 1")
TENSOR = Layout(2, "--tensor-model-parallel-size 2 --sequence-parallel")
INTERLEAVED = Layout(
    2, "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
)
CONTEXT = Layout(2, "--context-parallel-size 2")
EXPERT = Layout(2, "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall")

PAIRS = {
    "tensor x pipeline, recomputed": (
        "dense",
        Layout(4, f"{TENSOR.flags} --pipeline-model-parallel-size 2 {RECOMPUTED}"),
    ),
    "tensor x context": ("dense", Layout(4, f"{TENSOR.flags} {CONTEXT.flags}")),
    "pipeline x context": (
        "dense",
        Layout(4, f"{CONTEXT.flags} --pipeline-model-parallel-size 2"),
    ),
    "data x context": ("dense", Layout(4, f"{DATA.flags} {CONTEXT.flags}")),
    "expert x expert-tensor": (
        "experts",
        Layout(4, f"{EXPERT.flags} {TENSOR.flags} --expert-tensor-parallel-size 2"),
    ),
    "context, experts": ("experts", CONTEXT),
    "expert x pipeline": ("experts", Layout(4, f"{EXPERT.flags} --pipeline-model-parallel-size 2")),
}


@pytest.fixture(scope="module")
def train(tmp_path_factory, checkout_with):
    """A function that trains a layout from its model's one checkpoint; each run once."""
    root = tmp_path_factory.mktemp("parallel")
    project = checkout_with(runs=root / "runs")
    done = {}

    def run(model, layout, types, flags, recipe=None, **rest):
        name, sizes = MODELS[model]
        cell = resolve(
            *(name, "wikipedia", "bf16", "smoke"),
            extra_flags=tuple(f"{sizes} {flags}".split()),
            cluster=Cluster(nproc_per_node=layout.processes),
            recipe=recipe and read(recipe),
            **rest,
        )
        types = types | (cell.quantization.types if recipe else {})
        quantization = cell.quantization.model_copy(update={"types": types})
        return real_runs.run(project, cell.model_copy(update={"quantization": quantization}))

    def start(model):
        model = "dense" if model == "hybrid" else model  # which reads a GPT's checkpoint
        place = root / model
        if not place.exists():
            run(model, ONE, NONE, "--train-samples 4 --lr 0 --min-lr 0", checkpoint=place)
        return f"--load {place} --finetune --no-load-optim --no-load-rng"

    def train(layout=ONE, types=NONE, model="dense", recipe=None):
        key = (layout, *types.values(), model, recipe)
        if key not in done:
            rate = "" if types == NONE and not recipe else SHORT_STEPS
            flags = f"{start(model)} {layout.flags} {rate}"
            dump = (1,) if types != NONE or recipe else ()
            done[key] = run(model, layout, types, flags, dump=dump, recipe=recipe)
        return done[key]

    return train


def deviations(run, reference, steps=STEPS):
    """The largest relative deviations of the loss and of the gradient norm in the first steps."""
    assert len(run.read_metrics()[TRAIN_LOSS]) == STEPS
    found = [deviation(run, reference, name, steps) for name in (TRAIN_LOSS, NORM)]
    print(f"loss {found[0]:.1e}, gradient norm {found[1]:.1e}")
    return found


DENSE = {
    "data": ACCUMULATED,
    "tensor": TENSOR,
    "interleaved": INTERLEAVED,
    "context": CONTEXT,
}
# With types, and recomputed, stages are held to the same bound below.
MARKS = {"tensor": (), "interleaved": pytest.mark.heavy}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=name, marks=MARKS.get(name, pytest.mark.slow))
        for name, layout in DENSE.items()
    ],
)
def test_without_types_a_layout_trains_as_one_process(train, layout):
    assert max(deviations(train(layout), train())) < 1e-5


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TENSOR, id="tensor"),
        pytest.param(CONTEXT, id="context", marks=pytest.mark.heavy),
    ],
)
@pytest.mark.slow
def test_types_off_the_token_axis_train_as_in_one_process(train, layout):
    assert max(deviations(train(layout, NO_WGRAD), train(types=NO_WGRAD))) < 1e-3


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("kind", "sites", "model"),
    [
        ("fp8_tensor_e4m3", ("fprop", "dgrad", "wgrad"), "dense"),
        ("nvfp4", ("fprop", "dgrad", "wgrad"), "dense"),
        ("fp8_tensor_e4m3", ALL, "experts"),
    ],
    ids=["fp8", "nvfp4", "fp8 experts and attention"],
)
def test_a_scale_of_the_whole_tensor_trains_as_in_one_process(train, kind, sites, model):
    """The first step has the same weights; later ones differ by roundings that tip over."""
    types = NONE | dict.fromkeys(sites, kind)
    layout = Layout(2, f"{TENSOR.flags} {RECOMPUTED}")
    runs = train(layout, types, model), train(ONE, types, model)
    assert max(deviations(*runs, steps=1)) < 1e-4
    assert max(deviations(*runs)) < 1e-2


# Whose forward pass depends on the shard: averis draws in it, and quest takes the RMS of a shard.
SHARDED_FORWARD = ("averis", "quest")


@pytest.mark.heavy
@pytest.mark.parametrize("recipe", names())
def test_a_recipe_trains_over_tensor_ranks_as_in_one_process(train, recipe):
    """The ranks draw for the elements of their shards as one process draws for others."""
    layout = Layout(2, f"{TENSOR.flags} {RECOMPUTED}")
    runs = train(layout, NONE, "wide", recipe), train(ONE, NONE, "wide", recipe)
    loss, _ = deviations(*runs, steps=1)
    assert loss < (1e-3 if recipe in SHARDED_FORWARD else 1e-4)
    loss, norm = deviations(*runs)
    assert loss < 1e-2
    assert norm < 5e-2


def stages(pattern):
    return Layout(2, f"--pipeline-model-parallel-size 2 --hybrid-layer-pattern {pattern}")


@pytest.mark.slow
def test_unequal_stages_of_a_pattern_train_as_one_process(train):
    assert max(deviations(train(stages("*-*-*-|*-"), model="hybrid"), train())) < 1e-5


@pytest.mark.slow
def test_interleaved_segments_of_a_pattern_have_the_bits_of_the_interleaved_gpt(train):
    hybrid = train(stages("*-|*-|*-|*-"), ALL, "hybrid").read_metrics()
    gpt = train(INTERLEAVED, ALL).read_metrics()
    recorded = {
        name: rows
        for name, rows in gpt.items()
        if name.startswith("quant/") or name in (TRAIN_LOSS, NORM)
    }
    assert len(recorded) > 100
    for name, rows in recorded.items():
        assert hybrid[in_pattern(name)] == rows


@pytest.mark.slow
def test_data_parallel_ranks_draw_as_the_micro_batches_of_one_process(train):
    runs = train(DATA, NONE, "dense", "nvfp4"), train(ONE, NONE, "dense", "nvfp4")
    assert max(deviations(*runs, steps=1)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "bound"),
    [(Layout(1, RECOMPUTED), 0.0), (Layout(2, f"{INTERLEAVED.flags} {RECOMPUTED}"), 1e-5)],
    ids=["recomputed", "interleaved, recomputed"],
)
def test_recomputation_and_stages_repeat_what_is_drawn(train, layout, bound):
    """Stages add up norms and tied weights in another order, as they do without types."""
    runs = train(layout, NONE, "dense", "nvfp4"), train(ONE, NONE, "dense", "nvfp4")
    assert max(deviations(*runs)) <= bound


@pytest.mark.slow
def test_all_types_see_the_same_bits_on_the_same_tokens(train):
    """A data-parallel rank's first micro-batch is the first one of the one process.

    Upstream divides a gradient by the micro-batches of a rank, here one instead of two, which is
    exact, and moves an mx scale alone.
    """
    ours, theirs = (
        load_file(run.dumps / "iteration_1_rank_0.safetensors")
        for run in (train(DATA, ALL), train(types=ALL))
    )
    assert {name.split("/")[0] for name in theirs} == set(ALL)
    assert ours.keys() == theirs.keys()
    share = {name: 2 if name.endswith("/grad") else 1 for name in theirs}
    assert [name for name in theirs if not ours[name].equal(share[name] * theirs[name])] == []


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(TENSOR, id="tensor"),
        pytest.param(CONTEXT, id="context", marks=pytest.mark.heavy),
    ],
)
@pytest.mark.slow
def test_latent_attention_trains_as_in_one_process(train, layout):
    assert max(deviations(train(layout, model="latent"), train(model="latent"))) < 1e-5


@pytest.mark.slow
def test_experts_on_other_ranks_train_as_in_one_process(train):
    assert max(deviations(train(EXPERT, model="experts"), train(model="experts"))) < 1e-5


@pytest.mark.heavy
def test_quantized_experts_on_other_ranks_train_as_in_one_process(train):
    runs = train(EXPERT, NO_WGRAD, "experts"), train(ONE, NO_WGRAD, "experts")
    assert max(deviations(*runs)) < 1e-3


@pytest.mark.heavy
@pytest.mark.parametrize(("model", "layout"), PAIRS.values(), ids=PAIRS)
def test_pairs_train_as_one_process(train, model, layout):
    assert max(deviations(train(layout, model=model), train(model=model))) < 1e-5
