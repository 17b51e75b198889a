"""Short real runs through the launcher, for the tests that look at what they leave behind."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mqo.launch import run as launch
from mqo.launch.config import resolve
from mqo.matrix import tables
from mqo.quant.formats import ATTENTION, SITES
from mqo.recipes import recipe as recipes
from mqo.runs import TRAIN_LOSS, VALID_LOSS, RunFolder

from . import forking

STEPS = ("--train-samples", "12", "--eval-iters", "1", "--eval-interval", "100")

# A model so small that bf16 is quick on any machine, with two micro-batches a step.
TINY = (
    *("--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "128"),
    *("--num-attention-heads", "4", "--num-query-groups", "2"),
    *("--seq-length", "64", "--max-position-embeddings", "64"),
    *("--global-batch-size", "8", "--train-samples", "48"),
)

# These runs' coverage serves the tests; of others it is not recorded, as it takes a process.
MEASURED = {
    ("llama32-1b", "FA_linear_mxfp8", ("flags", TINY)),
    ("deepseek2_lite", "mxfp8", "tiny"),
}

# Every mode of the types that have scripts. The others are tested in a mode each, for all GEMMs.
MODES = tables.expand_modes(tables.ALL)

NORM = "grad-norm"
# Of six steps the third is saved, too.
LAST, SAVED = 6, 3
SAVED_HALFWAY = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 "
    f"--global-batch-size 4 --train-samples {4 * LAST} --save-interval {SAVED}"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-pre-softmax --moe-router-dtype fp32 "
    "--moe-ffn-hidden-size 64 --moe-aux-loss-coeff 0.01"
)
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# Adam turns the rounding noise of a small gradient into a whole step, and a quantizer a small
# difference into a whole rounding step: with short steps a few of them stay comparable.
SHORT_STEPS = "--lr 2e-5 --min-lr 2e-6"


class Starter:
    """Runs cells, each one once, in a place of the tests' own."""

    def __init__(self, project):
        self.project, self.done = project, {}

    def __call__(self, quantization, **rest):
        """The run folder of the cell: model, dataset, `flags` and all else that `resolve` takes.

        A recipe by its name, as "nvfp4 without hadamard".
        """
        model, training = rest.pop("model", "llama32-1b"), rest.pop("training", "smoke")
        key = (model, quantization, *([] if training == "smoke" else [training]))
        key += tuple(sorted(rest.items()))
        if key not in self.done:
            flags = STEPS + rest.pop("flags", ())
            if (recipe := rest.pop("recipe", None)) is not None:
                name, *without = recipe.split(" without ")
                rest["recipe"] = recipes.changed(recipes.read(name), without, ())
            dataset = rest.pop("dataset", "wikipedia")
            cell = resolve(model, dataset, quantization, training, extra_flags=flags, **rest)
            self.done[key] = run(self.project, cell, coverage=key in MEASURED)
        return self.done[key]


def transformed_recipe(folder, rounding="nearest-even"):
    """The file of a recipe: mxfp8 at all sites, and a transform of all operands of attention."""
    types = ", ".join(f'{name} = "mxfp8"' for name in SITES)
    transform = {ATTENTION: ', hadamard = 16, signs = "random"'}
    rows = (
        f'"{site.name}.{operand}" = {{ rounding = "{rounding}"{transform.get(site.layer, "")} }}\n'
        for site in SITES.values()
        for operand in (site.lhs, site.rhs)
    )
    path = folder / "transformed.toml"
    path.write_text(f"types = {{ {types} }}\n[operands]\n{''.join(rows)}")
    return str(path)


def run(project, cell, *, coverage=False):
    """The run folder of a cell that was trained."""
    with pytest.MonkeyPatch.context() as patch:
        if not coverage:
            patch.setattr(launch.coverage, "record", lambda *args: None)
        return RunFolder(Path(launch.run(project, cell, report=lambda text: None).run))


def launched(*words, folder=None):
    """What a launcher, `-m mqo` or a script, printed, and its exit code; programs are forked."""
    command = forking.launcher(sys.executable, *words)
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def stats_of(run):
    """The rows of what its quantizers recorded."""
    return json.loads(run.quant_stats.read_text())


def losses(run):
    """[(step, loss)] of training and, where there was any, of validation."""
    metrics = run.read_metrics()
    return metrics[TRAIN_LOSS], metrics.get(VALID_LOSS)


def deviation(run, reference, name, steps=None):
    """The largest relative deviation of a recorded value in the first steps, or in all."""
    pairs = list(zip(run.read_metrics()[name], reference.read_metrics()[name], strict=True))
    return max(abs(one - right) / abs(right) for (_, one), (_, right) in pairs[:steps])


def tracked(checkpoints):
    """The newest complete iteration, 0 without one."""
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text() or 0) if tracker.exists() else 0


def continued(saved, step, folder):
    """A folder of checkpoints in which this step is the newest."""
    name = f"iter_{step:07d}"
    shutil.copytree(saved / name, folder / name)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


def in_pattern(name):
    """The name of a GPT's metric in a HybridModel, which has two layers for each of a GPT."""

    def layer(match):
        return f"layers.{2 * int(match[1]) + (match[2] == 'mlp')}.{match[2]}"

    return re.sub(r"layers\.(\d+)\.(\w+)", layer, name)
