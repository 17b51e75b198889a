"""The demos in Megatron-LM/examples/parallelism, run as their reader runs them: 2 or 4 processes.

Each compares itself with one process; a demo that was broken must say so, and leave with 1.
"""

import os
import subprocess
import sys

import pytest
from mqo.project import Project

from .... import forking

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
FOLDER = Project.here().tree / "examples/parallelism"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
HELPERS = {"world", "moe_model"}
DEMOS = sorted({path.stem for path in FOLDER.glob("*.py")} - HELPERS)
COMPARISON = "against one process"

# What each scheme must not get wrong: processes, and the lines that get it wrong.
BREAKS = {
    # The ranks step with the gradients of their own sequences.
    "dp": (2, "dp.DistributedDataParallel.finish_grad_sync = lambda model: None"),
    # Each rank goes on with its own part of the sum.
    "tp": (2, "from megatron.core.tensor_parallel import mappings; mappings._reduce = take_first"),
    # One layer of one stage is not the whole model's.
    "pp": (
        4,
        "load = world.load\n"
        "def off(name): return 1.001 if name == 'layers.5.weight' else 1\n"
        "world.load = lambda m, w: load(m, {name: off(name) * w[name] for name in w})",
    ),
    # A rank takes one run of tokens, and attention makes the mask of two chunks.
    "cp": (
        2,
        "cp.get_batch_on_this_cp_rank = lambda batch, is_hybrid_cp, cp_group: "
        "{name: t.chunk(2, 1)[cp_group.rank()].contiguous() for name, t in batch.items()}",
    ),
    # Both ranks hold the experts 0 and 1.
    "ep": (2, "import moe_model; moe_model.whole_name = take_first"),
    # The copies of an expert keep their own gradients.
    "edp": (
        4,
        "edp.DistributedDataParallel.finish_grad_sync = "
        "lambda model: [group.finish_grad_sync() for group in model.bucket_groups]",
    ),
}
BROKEN = """
import sys
sys.path.insert(0, {folder!r})
import world, {demo}
def take_first(first, *rest): return first
{lines}
world.run({demo}.demo, processes={processes})
"""


ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def python(program):
    """What a program of so many processes on the CPU printed, and its exit code."""
    return forking.run([sys.executable, program], env=ENVIRONMENT)


@pytest.fixture(scope="module")
def run(vendored):
    """A function that runs a demo; each once."""
    done = {}

    def run(demo):
        if demo not in done:
            done[demo] = python(FOLDER / f"{demo}.py")
        return done[demo]

    return run


@pytest.mark.parametrize("demo", DEMOS)
def test_a_demo_equals_one_process(run, demo):
    found = run(demo)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1].startswith("EQUAL: the tolerance is ")


@pytest.mark.parametrize("demo", DEMOS)
def test_the_readme_shows_what_it_prints(run, demo):
    """All but the deviations, which are the machine's."""
    printed, _ = run(demo).stdout.strip().split(COMPARISON)
    assert f"## {demo.upper()}" in README
    assert f"]({demo}.py)" in README
    assert printed in README
    assert all(len(line) <= 80 for line in printed.splitlines())


SOON = {"tp", "edp"}


@pytest.mark.parametrize(
    "demo",
    [demo if demo in SOON else pytest.param(demo, marks=pytest.mark.heavy) for demo in BREAKS],
)
def test_a_broken_demo_says_so(vendored, tmp_path, demo):
    processes, lines = BREAKS[demo]
    program = tmp_path / "broken.py"
    text = BROKEN.format(folder=str(FOLDER), demo=demo, lines=lines, processes=processes)
    program.write_text(text, encoding="utf-8")
    found = python(program)
    assert found.returncode == 1, found.stderr
    assert found.stdout.splitlines()[-1].startswith("DIFFERENT: the tolerance is ")


def test_every_demo_can_be_broken():
    assert sorted(BREAKS) == DEMOS


@pytest.mark.heavy
def test_torchrun_starts_a_demo_with_other_ranks(vendored):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [sys.executable, *words, FOLDER / "tp.py"]
    found = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "channels 240-319 of 320" in found.stdout
