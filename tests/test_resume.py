"""Going on from a checkpoint, in the layout that saved it and in others: real runs."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
from mqo.launch.config import Cluster, RunConfig, resolve
from mqo.launch.finished import FILE, finished
from mqo.launch.machine import imagined
from mqo.launch.plan import layout_of, plan_layout
from mqo.matrix import tables
from mqo.quant.formats import ATTENTION_BACKWARD, SITES
from mqo.recipes import recipe as recipes
from mqo.runs import TRAIN_LOSS, VALID_LOSS, RunFolder
from mqo.scale.layout import Layout as Planned

pytest.importorskip("torch")
from . import real_runs
from .real_runs import (
    EXPERTS,
    LAST,
    SAVED,
    SAVED_HALFWAY,
    SHORT_STEPS,
    STEPS,
    TINY,
    continued,
    losses,
    stats_of,
    tracked,
)
from .vendored_tree import PROJECT

SIZES = f"{SAVED_HALFWAY} {SHORT_STEPS} --eval-iters 0"


@dataclass(frozen=True)
class Layout:
    """Processes, and upstream's flags that share the work out among them."""

    processes: int = 1
    flags: str = ""

    def __add__(self, flags):
        return Layout(self.processes, f"{self.flags} {flags}")


ONE = Layout()
TWO = Layout(2)
TENSOR = TWO + "--tensor-model-parallel-size 2 --sequence-parallel"
PIPELINE = TWO + "--pipeline-model-parallel-size 2"
SHARDED = " ".join(Planned(1).flags())  # as the launcher chooses it on GPUs
RESHARDABLE = f"{SHARDED} --dist-ckpt-optim-fully-reshardable"
EXPERT = TWO + f"{EXPERTS} --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
EXPERT_FOUR = Layout(4, f"{EXPERT.flags} --expert-model-parallel-size 4 --micro-batch-size 1")


@pytest.fixture(scope="module")
def train(tmp_path_factory, checkout_with):
    """A function that trains a layout, from the third step of another one where that is given."""
    root = tmp_path_factory.mktemp("resume")
    project = checkout_with(runs=root / "runs")
    done = {}

    def run(layout, place):
        cell = resolve(
            *("llama32-1b", "wikipedia", "FA_linear_mxfp8", "smoke"),
            extra_flags=tuple(f"{SIZES} {layout.flags}".split()),
            cluster=Cluster(nproc_per_node=layout.processes),
            checkpoint=place,
        )
        return real_runs.run(project, cell)

    def train(layout, start=None):
        if (layout, start) not in done:
            saved = train(start)[0] if start else None
            place = root / f"checkpoints {len(done)}"
            if saved:
                continued(saved, SAVED, place)
            done[layout, start] = place, run(layout, place)
        return done[layout, start]

    return train


def heavy(*values, id):
    return pytest.param(*values, id=id, marks=pytest.mark.heavy)


SAME = [pytest.param(TWO + SHARDED, id="distributed optimizer"), heavy(TENSOR, id="tensor")]


@pytest.mark.parametrize("layout", SAME)
def test_the_same_layout_goes_on_bit_equal(train, layout):
    (_, whole), (_, rest) = train(layout), train(layout, start=layout)
    assert len(losses(rest)[0]) == LAST - SAVED
    assert losses(rest)[0] == losses(whole)[0][SAVED:]


@pytest.mark.slow
def test_a_checkpoint_says_the_layout_that_a_run_on_gpus_keeps(train, start):
    machine = imagined("h100-80gb", 8)

    def kept(checkpoints):
        where = Cluster(nproc_per_node=8)
        cell = resolve(
            *("llama32-1b", "wikipedia", "FA_linear_mxfp8", "standard"),
            cluster=where,
            checkpoint=checkpoints,
        )
        planned, _ = plan_layout(PROJECT.tree, cell, machine, cell.quantization.types)
        return layout_of(planned.placement.layout, 8)

    assert kept(train(TWO + SHARDED)[0]) == Planned(8)
    plain = start("bf16", flags=TINY).checkpoints
    assert tracked(plain) > 0
    assert kept(plain) == Planned(8, sharded=False, overlap=False)


OTHERS = [
    pytest.param(TWO + RESHARDABLE, TENSOR + RESHARDABLE, id="distributed optimizer, to tensor"),
    heavy(TWO + SHARDED, ONE + SHARDED, id="distributed optimizer, to one"),
    heavy(ONE, TENSOR, id="one to tensor"),
    heavy(TENSOR, PIPELINE, id="tensor to pipeline"),
    heavy(PIPELINE, TWO, id="pipeline to data"),
    heavy(EXPERT, EXPERT_FOUR, id="experts, two to four"),
]


@pytest.mark.parametrize(("saved", "layout"), OTHERS)
@pytest.mark.slow
def test_another_layout_goes_on_alike(train, saved, layout):
    (_, whole), (_, rest) = train(saved), train(layout, start=saved)
    assert [step for step, _ in losses(rest)[0]] == list(range(SAVED + 1, LAST + 1))
    for (_, ours), (_, theirs) in zip(losses(rest)[0], losses(whole)[0][SAVED:], strict=True):
        print(abs(ours - theirs) / theirs)
        assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.slow
def test_cached_weights_and_a_schedule_go_on_from_a_checkpoint(start, tmp_path):
    """Two steps, and four more in a new process, are six: the type changes at the fourth."""
    rest = {"cache_weights": True, "schedule": ("linear: mxfp4 until 0.5, then mxfp8",)}
    rest["flags"] = (*TINY, "--save-interval", "2")
    whole = start("linear_mxfp4", **rest)
    types = {(r["quant_type"], r["calls"]) for r in stats_of(whole) if r["site"] == "fprop"}
    # Two micro-batches a step, and two of evaluation at the end.
    assert types == {("mxfp4", 6), ("mxfp8", 6 + 2)}
    folder = continued(whole.checkpoints, 2, tmp_path / "checkpoint")
    resumed = start("linear_mxfp4", checkpoint=folder, **rest)
    assert losses(resumed)[0] == losses(whole)[0][2:]
    assert "in the run that wrote the checkpoint" not in resumed.log.read_text()


def stopped(saved, copy):
    """A copy of a folder of checkpoints, as a kill before the final validation leaves it."""
    shutil.copytree(saved, copy)
    (copy / FILE).unlink()
    return copy


ENDED = {
    "all GEMMs": ("mxfp8", {"gemms": "all", "rounding": "stochastic"}, ()),
    "two tensor-parallel ranks": (
        "FA_linear_mxfp4",
        {"rounding": "stochastic", "cluster": Cluster(nproc_per_node=2)},
        ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    ),
    "a recipe": ("bf16", {"recipe": "nvfp4"}, ()),
    "a schedule": ("linear_mxfp4", {"schedule": ("linear: mxfp4 until 0.5, then mxfp8",)}, ()),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n == "all GEMMs" else pytest.mark.heavy)
        for n in ENDED
    ],
)
def test_a_run_that_is_killed_before_its_final_validation_makes_that(start, tmp_path, name):
    """In a new process, and with the same loss to the bit."""
    mode, rest, flags = ENDED[name]
    own = {"training": "tiny", "flags": (*flags, "--eval-interval", "2"), **rest}
    whole = start(mode, checkpoint=tmp_path / "whole", **own)
    copy = stopped(tmp_path / "whole", tmp_path / "copy")
    again = start(mode, checkpoint=copy, **own)
    assert TRAIN_LOSS not in again.read_metrics()
    assert again.read_metrics()[VALID_LOSS] == losses(whole)[1][-1:]
    assert RunConfig.read(again).experiment.checkpoint == copy
    assert finished(RunConfig.read(again)).run == again.root.resolve()


@pytest.mark.slow
def test_a_length_in_steps_is_that_in_samples(start):
    """With the same learning rates, samples and losses, to the bit."""
    by_sample = start("bf16", training="tiny", flags=("--train-samples", "12"))
    sizes = resolve("llama32-1b", "wikipedia", "bf16", "tiny", extra_flags=("--train-iters", "3"))
    by_step = real_runs.run(start.project, sizes)
    names = (TRAIN_LOSS, "learning-rate")
    one, other = by_sample.read_metrics(), by_step.read_metrics()
    assert [one[name] for name in names] == [other[name] for name in names]


@pytest.mark.heavy
@pytest.mark.parametrize("quant_type", tables.quant_types())
@pytest.mark.parametrize("model", ["llama32-1b", "deepseek2_lite"])
def test_every_format_trains_all_linear_gemms_and_goes_on_bit_equal(
    start, tmp_path, model, quant_type
):
    own = {"model": model, "training": "tiny", "gemms": "all"}
    whole = trained_in_two_parts(start, tmp_path, f"linear_{quant_type}", **own)
    ran = {(row["site"], row["quant_type"]) for row in stats_of(whole)}
    assert ran == {(site, quant_type) for site in ("fprop", "dgrad", "wgrad")}


@pytest.mark.parametrize("model", ["llama32-1b", "deepseek2_lite"])
@pytest.mark.parametrize(
    "transformed",
    [
        pytest.param(True, id="stochastic, transformed", marks=pytest.mark.slow),
        heavy(False, id="nearest-even"),
    ],
)
def test_all_ten_sites_train_and_go_on_bit_equal(start, tmp_path, model, transformed):
    mode, own = "mxfp8", {"gemms": "all", "attention_gemms": "all"}
    if transformed:
        mode, own = "bf16", {"recipe": real_runs.transformed_recipe(tmp_path, "stochastic")}
    own |= {"model": model, "training": "tiny"}
    whole = trained_in_two_parts(start, tmp_path, mode, **own)
    rows = stats_of(whole)
    ran = {(row["site"], row["quant_type"]) for row in rows if row["quant_type"] != "excluded"}
    assert ran == {(site, "mxfp8") for site in SITES}
    assert {(row["site"], row["operand"]) for row in rows} == {
        (name, operand) for name, site in SITES.items() for operand in (site.lhs, site.rhs)
    }
    calls = {row["calls"] for row in rows if row["site"] in ATTENTION_BACKWARD}
    assert len(calls) == 1


IN_PARTS = ("--train-samples", f"{4 * LAST}", "--global-batch-size", "4")
IN_PARTS += ("--save-interval", f"{SAVED}")


def trained_in_two_parts(start, tmp_path, mode, **own):
    """A run that learned; what goes on from its checkpoint halfway has its losses, to the bit."""
    whole = start(mode, flags=IN_PARTS, checkpoint=tmp_path / "whole", **own)
    folder = continued(tmp_path / "whole", SAVED, tmp_path / "halfway")
    trained = losses(whole)[0]
    assert [step for step, _ in trained] == list(range(1, LAST + 1))
    assert losses(start(mode, flags=IN_PARTS, checkpoint=folder, **own))[0] == trained[SAVED:]
    assert trained[-1][1] < trained[0][1]
    return whole


@pytest.mark.heavy
@pytest.mark.parametrize("recipe", recipes.names())
@pytest.mark.parametrize("model", ["llama32-1b", "deepseek2_lite"])
def test_every_recipe_trains_and_goes_on_bit_equal(start, tmp_path, model, recipe):
    if (model, recipe) == ("deepseek2_lite", "quest"):
        pytest.skip("QuEST needs multiples of 128, and the small model has other sizes")
    own = {"model": model, "training": "tiny", "recipe": recipe}
    whole = trained_in_two_parts(start, tmp_path, "bf16", **own)
    types = {s: t for s, t in recipes.read(recipe).types.model_dump().items() if t != "none"}
    rows = [row for row in stats_of(whole) if row["quant_type"] != "excluded"]
    assert {row["site"] for row in rows} == set(types)
    assert not [row for row in rows if row["layer"] == "output_layer"]


LAYERED = """
types = { fprop = "nvfp4", dgrad = "nvfp4", wgrad = "nvfp4", qk = "mxfp8", pv = "mixed" }
[operands]
"dgrad.grad" = { rounding = "stochastic" }
"pv.probs" = { quant_type = "mxfp8_e5m2" }
"pv.value" = { quant_type = "mxfp8" }
[[rules]]
first = 1
recipe = "forward"
[[rules]]
parts = ["qkv", "experts"]
recipe = "mxfp8"
[recipes.forward]
types = { fprop = "mxfp4", dgrad = "mixed", wgrad = "mixed" }
[recipes.forward.operands]
"dgrad.grad" = { quant_type = "none" }
"dgrad.weight" = { quant_type = "none", source = "fprop" }
"wgrad.grad" = { quant_type = "none" }
"wgrad.x" = { quant_type = "none", source = "fprop" }
"""


@pytest.mark.parametrize(
    "model",
    [
        pytest.param("deepseek2_lite", marks=pytest.mark.slow),
        pytest.param("llama32-1b", marks=pytest.mark.heavy),
    ],
)
def test_layers_with_recipes_train_and_go_on_bit_equal(start, tmp_path, model):
    path = tmp_path / "layered.toml"
    path.write_text(LAYERED)
    own = {"model": model, "training": "tiny", "recipe": str(path)}
    whole = trained_in_two_parts(start, tmp_path, "bf16", **own)
    rows = stats_of(whole)
    assert {r["quant_type"] for r in rows if r["layer"] == "output_layer"} == {"excluded"}
    ran: dict[str, set] = {}
    for row in rows:
        if row["quant_type"] != "excluded":
            place = f"{row['site']}.{row['operand']}"
            ran.setdefault(row["layer"], set()).add((place, row["quant_type"]))
    places = ("fprop.x", "fprop.weight", "dgrad.weight", "wgrad.x")
    forward = {(place, "mxfp4") for place in places}
    first = [name for name in ran if name.startswith("decoder.layers.0.")]
    for name in first:
        assert ran.pop(name) == forward  # its attention is unquantized
    assert len(first) >= 4
    for name, operands in ran.items():
        kinds = {kind for _, kind in operands}
        if "core_attention" in name:
            assert kinds == {"mxfp8", "mxfp8_e5m2"}
        elif any(part in name for part in ("linear_q", "linear_kv", ".experts.")):
            assert kinds == {"mxfp8"}
        else:
            assert kinds == {"nvfp4"}


NODE = """
import json, sys
from pathlib import Path
from mqo.launch import run
from mqo.terminal import guarded
from mqo.launch.config import Cluster, resolve
from mqo.project import Project

runs, checkpoint, rank, port, *flags = sys.argv[1:]
where = Cluster(nnodes=2, node_rank=int(rank), master_addr="127.0.0.1", master_port=int(port))
cell = resolve("llama32-1b", "wikipedia", "mxfp8", "smoke", extra_flags=tuple(flags),
               cluster=where, checkpoint=Path(checkpoint))
project = type("Elsewhere", (Project,), {"runs": property(lambda self: Path(runs))})
run.coverage.record = lambda *args: None
guarded(lambda: run.run(project(Project.here().root), cell))
"""


def two_nodes(runs, checkpoint, *flags):
    """Two launchers of one training, as a batch system starts one on each machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return [
        subprocess.Popen(
            [sys.executable, "-c", NODE, runs, checkpoint, str(rank), port, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]


@pytest.mark.heavy
def test_two_nodes_that_are_asked_to_leave_save_and_go_on(tmp_path):
    """SIGUSR1 to each launcher in the third step or later; the same command ends what is left."""
    flags = (*STEPS, *TINY, "--micro-batch-size", "4", "--tensor-model-parallel-size", "2")
    flags += ("--recompute-granularity", "selective", "--recompute-modules", "core_attn")
    runs, saved = tmp_path / "runs", tmp_path / "checkpoints"
    nodes = two_nodes(runs, saved, *flags, "--train-samples", "4096")
    try:
        while all(node.poll() is None for node in nodes):
            rows = [RunFolder(run).read_metrics().get(TRAIN_LOSS, []) for run in runs.glob("*")]
            if any(row and row[-1][0] >= 3 for row in rows):
                break
            time.sleep(0.01)
        for node in nodes:
            node.send_signal(signal.SIGUSR1)
        said = [node.communicate()[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [os.EX_TEMPFAIL] * 2, said
    assert all("with a CHECKPOINT, continues" in text for text in said)
    done = tracked(saved)
    assert done >= 3
    flags += ("--train-samples", "4096", "--exit-interval", str(done + 2))
    nodes = two_nodes(runs, saved, *flags)
    said = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    folders = sorted(run.name.partition("_llama")[2] for run in runs.iterdir())
    assert folders == [f"32-1b-changed_wikipedia_mxfp8_smoke_node{n}" for n in (0, 0, 1, 1)]
    first, last = sorted(runs.glob("*_node*"))[2:]
    assert not RunFolder(first).metrics.exists()
    assert [step for step, _ in RunFolder(last).read_metrics()[TRAIN_LOSS]] == [done + 1, done + 2]
    assert {row["site"] for row in stats_of(RunFolder(first))} == {"fprop", "qk", "pv"}
