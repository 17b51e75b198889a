"""Quantizers of the user in real runs: trained with, recorded, replayed, resumed, evaluated."""

import json
import shutil

import pytest
from mqo.errors import CheckpointError, RunError
from mqo.launch import evaluation
from mqo.launch.config import Cluster, RunConfig, resolve
from mqo.launch.export import export
from mqo.launch.forward_pass import AS_TRAINED, SavedModel
from mqo.launch.origin import is_own
from mqo.launch.rerun import BitEqual, rerun
from mqo.project import Project
from mqo.quant.plugin_modules import digest_of
from mqo.quant.plugins import PLUGINS
from mqo.runs import TRAIN_LOSS, RunFolder

pytest.importorskip("torch")
import torch

from . import real_runs
from .real_runs import EXPERTS, RECOMPUTED, STEPS, TINY, continued, launched, losses, stats_of
from .vendored_tree import PROJECT

pytestmark = pytest.mark.slow

# What it returns depends on its option and on two modules of its folder.
FILES = {
    "mine.py": """
from __future__ import annotations
from dataclasses import dataclass
from kinds import kind_of
from mqo.quant import fake_quantize, quantizer

@dataclass
class Kind:
    name: str = ""

@quantizer("mine", block=32, options={"letter": "a"})
def mine(x, context):
    return fake_quantize(x, Kind(kind_of(context.options["letter"])).name)
""",
    "kinds/__init__.py": """
from .table import KINDS

def kind_of(letter):
    return KINDS[letter]
""",
    "kinds/table.py": 'KINDS = {"a": "mxfp4", "b": "mxfp8"}\n',
}
MODE = "mine"
SITES = ("fprop", "dgrad", "wgrad", "qk", "pv")

EXPERT = f"{EXPERTS} --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2"
# Ranks share the experts, and the data of all other layers.
SHARED = {
    "flags": f"{EXPERT} --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "processes": 2,
}


def program(*words, folder):
    done = launched(*words, folder=folder)
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of train_config.py with the quantizer, whose file and modules are gone since."""
    place = tmp_path_factory.mktemp("own")
    folder = place / "a folder"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    names = ("--model", "llama32-1b", "--dataset", "wikipedia", "--training-config", "smoke")
    own = ("--plugin", "a folder/mine.py", "--plugin-option", "mine.letter=b", "--dump", "1")
    done = program(
        *(PROJECT.root / "script/train_config.py", *names, "--quantization", MODE, *own),
        *("--gemms", "all", "--runs", "the runs", "--", *STEPS, *TINY),
        folder=place,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(folder)
    (run,) = (place / "the runs").iterdir()
    return RunFolder(run)


def test_it_trains_to_the_bits_of_the_format_that_it_computes(trained, start):
    expected = start("mxfp8", gemms="all", flags=(*TINY, "--attention-backend", "unfused"))
    assert len(losses(trained)[0]) == 6
    assert losses(trained) == losses(expected)
    noise = [
        {(r["site"], r["layer"], r["operand"], r["calls"], r["noise"]) for r in stats_of(run)}
        for run in (trained, expected)
    ]
    assert noise[0] == noise[1]
    assert "attention with a quantized pv stores its s x s scores" in trained.log.read_text()


def test_ranks_with_other_experts_and_data_train_to_the_bits_of_the_format(trained, start):
    rest = {"training": "tiny", "gemms": "all", "flags": (*TINY, *SHARED["flags"].split())}
    rest["cluster"] = Cluster(nproc_per_node=SHARED["processes"])
    own = {"plugins": (trained.plugins / "mine/mine.py",), "plugin_options": ("mine.letter=b",)}
    assert losses(start(MODE, **own, **rest)) == losses(start("mxfp8", **rest))


def test_the_run_keeps_copies_of_the_files_that_it_ran(trained):
    folder = trained.plugins / "mine"
    python = list(folder.rglob("*.py"))
    assert {str(path.relative_to(folder)): path.read_text() for path in python} == FILES
    config = RunConfig.read(trained)
    (plugin,) = config.quantization.plugins
    assert plugin.digest == digest_of(folder / "mine.py")
    assert plugin.options == {"letter": "b"}
    assert config.quantization.name == f"{MODE} {plugin.digest[:6]} letter=b"
    assert plugin.digest[:6] in trained.root.name and " " not in trained.root.name


def test_its_records_name_the_type(trained):
    assert {(row["site"], row["quant_type"]) for row in stats_of(trained)} == {
        (site, "mine") for site in SITES
    }
    coverage = json.loads(trained.coverage.read_text())
    kinds = {row["quant_type"] for row in coverage["products"]}
    assert kinds == {"mine", "none"}  # none: the products of attention's backward pass
    assert coverage["quantized_share"] > 0.5
    assert json.loads(trained.result.read_text())["types"] == dict.fromkeys(SITES, "mine")
    assert "custom_quant_type = 'mine'" in trained.overlay_diff.read_text()


def test_a_replay_runs_the_copies_and_is_bit_equal(trained, checkout_with, tmp_path):
    # Packages that another test imported bring their own ones to the path of this process.
    project = checkout_with(runs=tmp_path)
    result = rerun(project, trained, allow_versions=True, report=lambda text: None)
    assert result == BitEqual(result.run, 6)
    again = RunFolder(tmp_path / result.run)
    assert stats_of(again) == stats_of(trained)
    assert digest_of(again.plugins / "mine/mine.py") == digest_of(trained.plugins / "mine/mine.py")
    assert PLUGINS["mine"].function is None


def test_an_evaluation_runs_the_quantizer_of_ones_own_run(vendored, trained):
    words = evaluation.text(tokens=128)
    model = SavedModel.find(trained.root)
    own, equal = evaluation.evaluate(vendored, [model], [AS_TRAINED, "mxfp8"], words)
    assert own.mode == f"{MODE} {digest_of(trained.plugins / 'mine/mine.py')[:6]} letter=b"
    assert own.types == {"fprop": "mine", "qk": "mine", "pv": "mine"}
    assert own.loss == equal.loss


def test_its_weights_are_exported_in_a_format(vendored, trained, tmp_path):
    pytest.importorskip("modelopt")
    pytest.importorskip("transformers")
    packed = export(vendored.root, trained.root, tmp_path / "packed", "mxfp8", layout="mqo")
    assert packed.types == {"mxfp8": 14}


# -- a run from elsewhere --------------------------------------------------------------------------


@pytest.fixture
def foreign(trained, tmp_path):
    """A copy of the run whose quantizers, and the user's former files, would make a marker."""
    marker = tmp_path / "it ran"
    run = RunFolder(shutil.copytree(trained.root, tmp_path / "foreign"))
    source = RunConfig.read(run).quantization.plugins[0].source
    for folder in (run.plugins / "mine", source.parent):
        for name, text in FILES.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            head = "from __future__ import annotations\n"
            path.write_text(f"{head}open({str(marker)!r}, 'w')\n{text.replace(head, '')}")
    yield run
    shutil.rmtree(source.parent)
    assert not marker.exists()


# Those that start a process. The others: tests/mqo/test_unrun_plugins.py.
READING = {
    "stats": ("stats", "foreign/dumps/iteration_1_rank_0.safetensors", "--tensor", "qk/*"),
    "convert": ("convert", "megatron-to-hf", "foreign", "made"),
    "status": ("status",),
    "eval": ("eval", "foreign", "--modes", "bf16", "--tokens", "64"),
    "generate": ("generate", "foreign", "--mode", "bf16", "--prompt", "The", "--tokens", "2"),
}
REFUSED = {
    "rerun": ("rerun", "foreign", "--allow-versions"),
    "eval": ("eval", "foreign", "--tokens", "64"),
    "generate": ("generate", "foreign", "--prompt", "The", "--tokens", "2"),
    "export": ("export", "foreign", "made"),
}


@pytest.mark.parametrize("words", READING.values(), ids=READING)
def test_a_command_that_reads_the_run_does_not_run_its_quantizers(foreign, words):
    done = program("-m", "mqo", *words, folder=foreign.root.parent)
    assert done.returncode in (0, 1) and done.stdout, done.stderr  # 1: an action due


@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
def test_a_command_that_would_run_them_refuses_the_run(foreign, words):
    done = program("-m", "mqo", *words, folder=foreign.root.parent)
    assert done.returncode == 2 and done.stderr.startswith("mqo: "), done.stdout + done.stderr
    assert not (foreign.root.parent / "made").exists()


def test_a_run_with_another_module_of_its_quantizer_is_not_ones_own(
    trained, checkout_with, tmp_path
):
    """Though command, source and the file itself are those that ran."""
    run = RunFolder(shutil.copytree(trained.root, tmp_path / "changed"))
    assert is_own(Project.here(), run)
    table = run.plugins / "mine/kinds/table.py"
    table.write_text(table.read_text().replace("mxfp8", "mxfp4"))
    with pytest.raises(RunError, match="--trust"):
        rerun(checkout_with(runs=tmp_path / "runs"), run)
    assert not (tmp_path / "runs").exists()


# -- states, gradients and layouts -----------------------------------------------------------------

# "delayed" and "drawn" scale by the amax of earlier steps.
QUANTIZERS = """
import torch
from mqo.quant import end_step, estimator, quantizer

@quantizer("delayed", options={"weight": 0.5}, state={"amax": 0.5})
def delayed(x, context):
    context.note("amax", x.abs().max())
    step = context.state["amax"] / 64
    return (x / step).round().clamp(-64, 64) * step

@end_step("delayed")
def end(state, notes, step, options):
    weight = options["weight"]
    return {"amax": weight * notes["amax"] + (1 - weight) * state["amax"]}

@quantizer("drawn", stochastic=True, state={"amax": 0.5})
def drawn(x, context):
    context.note("amax", x.abs().max())
    step = context.state["amax"] / 64
    return (x / step + context.rand()).floor().clamp(-64, 64) * step

@end_step("drawn")
def largest(state, notes, step, options):
    return notes

@quantizer("steep", estimator=True)
def steep(x, context):
    return (x * 4096).round() / 4096

@estimator("steep")
def gradient(grad, x, context):
    share = context.step + 1 if context.operand == "weight" else 1
    return share * grad * (1 + torch.tanh(10 * x))
"""
HALF, WHOLE = 2, 4
SIZES = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 64 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 "
    f"--global-batch-size 4 --train-samples {4 * WHOLE} --save-interval {HALF} "
    "--eval-iters 1 --eval-interval 3 --lr 1e-4 --min-lr 1e-5"
)
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
PIPELINE = "--pipeline-model-parallel-size 2"


@pytest.fixture(scope="module")
def train(tmp_path_factory, checkout_with):
    """A function that trains in a layout: whole, or from the middle of `start`."""
    root = tmp_path_factory.mktemp("layouts")
    file = root / "several.py"
    file.write_text(QUANTIZERS)
    project = checkout_with(runs=root / "runs")
    done = {}

    def train(mode="FA_linear_delayed", flags="", processes=1, start=None, gemms="all", **rest):
        key = (mode, flags, processes, start, *rest)
        if key not in done:
            checkpoints = tmp_path_factory.mktemp("checkpoints")
            if start:
                continued(start, HALF, checkpoints)
            cell = resolve(
                *("llama32-1b", "wikipedia", mode, "smoke"),
                extra_flags=tuple(f"{SIZES} {flags}".split()),
                cluster=Cluster(nproc_per_node=processes),
                checkpoint=checkpoints,
                gemms=gemms,
                plugins=[file],
                plugin_options=["delayed.weight=0.75"] if "delayed" in mode else [],
                **rest,
            )
            done[key] = real_runs.run(project, cell), checkpoints
        return done[key]

    return train


RESUMED = {
    "tensor, recomputed": {"flags": f"{TENSOR} {RECOMPUTED}", "processes": 2},
    "pipeline": {"flags": PIPELINE, "processes": 2},
    "cached weights": {"cache_weights": True},  # a validation caches them, too
    "experts and data": {"mode": "FA_linear_drawn", **SHARED},
}


def saved(iteration):
    """The content of a checkpoint that all ranks share, such as the arguments."""
    from megatron.inference.checkpointing import common_state

    state = common_state(iteration)
    torch.distributed.destroy_process_group()  # which common_state made
    return state


def saved_states(checkpoints, step=WHOLE):
    return saved(checkpoints / f"iter_{step:07d}")["args"].mqo_states


@pytest.mark.parametrize("layout", RESUMED.values(), ids=RESUMED)
def test_a_resumed_training_has_the_losses_and_states_of_the_whole_one(train, layout):
    """The whole one has one process, but if each rank would draw other numbers."""
    whole, checkpoints = train(**layout if "mode" in layout else {})
    rest, resumed = train(start=checkpoints, **layout)
    assert [step for step, _ in losses(rest)[0]] == list(range(HALF + 1, WHOLE + 1))
    assert losses(rest)[0] == losses(whole)[0][HALF:]
    assert saved_states(resumed).keys() == saved_states(checkpoints).keys()


STEEP = {"mode": "linear_steep", "gemms": "fprop"}
SPLIT = {
    "tensor, experts": f"{EXPERT} {TENSOR} --expert-tensor-parallel-size 1",
    "pipeline, grouped experts": f"{EXPERTS} {PIPELINE} --moe-grouped-gemm",
}


@pytest.mark.parametrize("flags", SPLIT.values(), ids=SPLIT)
def test_an_estimator_computes_the_gradients_of_one_process(train, flags):
    """Also those of a weight that is tied.

    Only of the first step, as upstream cannot share out a saved optimizer among experts.
    """
    whole, checkpoints = train(flags=EXPERTS, **STEEP)
    flags = f"{flags} --no-load-optim"
    rest, _ = train(flags=flags, processes=2, start=checkpoints, **STEEP)
    for name in (TRAIN_LOSS, "grad-norm"):
        expected, ours = (run.read_metrics()[name] for run in (whole, rest))
        assert ours[0][1] == pytest.approx(expected[HALF][1], rel=1e-5)
    assert expected[-1][1] > HALF * expected[0][1]  # as its share of steps says


def test_checkpoints_hold_the_states_of_all_layers(train):
    checkpoints = train()[1]
    names = [name.split("/") for name in saved_states(checkpoints)]
    assert {(name, site, state) for name, site, *_, state in names} == {
        ("delayed", site, "amax") for site in SITES if site != "pv"
    }
    for block in range(2):
        assert any(f"layers.{block}." in layer for _, _, layer, *_ in names)
    half, whole = saved_states(checkpoints, HALF), saved_states(checkpoints)
    assert sum(half[name] != whole[name] for name in whole) > len(whole) / 2


@pytest.fixture
def with_states(train, tmp_path):
    """A function that returns the last checkpoint of the whole training with other states."""

    def copy(change):
        run, checkpoints = train()
        name = f"iter_{WHOLE:07d}"
        folder = shutil.copytree(checkpoints / name, tmp_path / name)
        content = saved(folder)
        content["args"].mqo_states = change(content["args"].mqo_states)
        torch.save(content, folder / "common.pt")
        (folder / "integrity.json").unlink()
        return SavedModel("changed", folder, run.quant_config)

    return copy


def test_an_evaluation_uses_the_saved_states(vendored, train, with_states):
    models = [SavedModel.find(train()[0].root), with_states(lambda states: {})]
    own, without = evaluation.evaluate(vendored, models, [AS_TRAINED], evaluation.text(tokens=512))
    assert own.types == without.types == {"fprop": "delayed", "qk": "delayed", "pv": "none"}
    assert own.loss != pytest.approx(without.loss, rel=1e-5)


def test_damaged_states_of_a_checkpoint_are_refused(vendored, with_states):
    model = with_states(lambda states: dict.fromkeys(states, "[1.0"))
    with pytest.raises(CheckpointError, match="states of quantizers") as caught:
        evaluation.evaluate(vendored, [model], [AS_TRAINED], evaluation.text(tokens=64))
    assert "\n" not in str(caught.value)
