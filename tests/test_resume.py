"""Going on from a checkpoint, in the layout that saved it and in others: real runs."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from mqo.launch import run as launch
from mqo.launch.cell import Cluster, resolve
from mqo.project import Project
from mqo.runs import TRAIN_LOSS, RunFolder

pytest.importorskip("torch")

PROJECT = Project.here()
if not (PROJECT.tree / "megatron/core").exists():
    pytest.skip("the tree is not vendored: run `mqo setup`", allow_module_level=True)

STEPS, SAVED = 6, 3
SIZES = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--num-query-groups 2 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 "
    f"--global-batch-size 4 --train-samples {4 * STEPS} --lr 2e-5 --min-lr 2e-6 --eval-iters 0 "
    f"--save-interval {SAVED}"
)
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-router-pre-softmax --moe-router-dtype fp32 "
    "--moe-ffn-hidden-size 64 --moe-aux-loss-coeff 0.01"
)


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
SHARDED = "--use-distributed-optimizer"
RESHARDABLE = f"{SHARDED} --dist-ckpt-optim-fully-reshardable"
EXPERT = TWO + f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"


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
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch.coverage, "record", lambda *args: None)
            return RunFolder(Path(launch.run(project, cell, report=lambda text: None).run))

    def train(layout, start=None):
        if (layout, start) not in done:
            saved = train(start)[0] if start else None
            place = root / f"checkpoints {len(done)}"
            if saved:
                name = f"iter_{SAVED:07d}"
                shutil.copytree(saved / name, place / name)
                (place / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
            done[layout, start] = place, run(layout, place)
        return done[layout, start]

    return train


def losses(run):
    return run.read_metrics()[TRAIN_LOSS]


@pytest.mark.parametrize("layout", [TWO + SHARDED, TENSOR], ids=["distributed optimizer", "tensor"])
def test_the_same_layout_goes_on_bit_equal(train, layout):
    (_, whole), (_, rest) = train(layout), train(layout, start=layout)
    assert len(losses(rest)) == STEPS - SAVED
    assert losses(rest) == losses(whole)[SAVED:]


OTHERS = {
    "one to tensor": (ONE, TENSOR),
    "tensor to pipeline": (TENSOR, PIPELINE),
    "pipeline to data": (PIPELINE, TWO),
    "distributed optimizer, two to one": (TWO + SHARDED, ONE + SHARDED),
    "distributed optimizer, data to tensor": (TWO + RESHARDABLE, TENSOR + RESHARDABLE),
    "experts, one to two": (ONE + EXPERTS, EXPERT),
}


@pytest.mark.parametrize(("saved", "layout"), OTHERS.values(), ids=OTHERS)
def test_another_layout_goes_on_alike(train, saved, layout):
    (_, whole), (_, rest) = train(saved), train(layout, start=saved)
    assert [step for step, _ in losses(rest)] == list(range(SAVED + 1, STEPS + 1))
    for (_, ours), (_, theirs) in zip(losses(rest), losses(whole)[SAVED:], strict=True):
        print(abs(ours - theirs) / theirs)
        assert ours == pytest.approx(theirs, rel=1e-3)
