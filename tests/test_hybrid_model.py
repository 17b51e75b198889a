"""HybridModels against GPTs: every recorded value of real runs in either class."""

import pytest
from mqo.launch.config import Cluster, resolve
from mqo.runs import TRAIN_LOSS

pytest.importorskip("torch")

from . import real_runs
from .real_runs import RECOMPUTED, in_pattern
from .vendored_tree import PROJECT as PROJECT

STEPS = 4
LENGTH = f"--global-batch-size 4 --micro-batch-size 2 --train-samples {4 * STEPS} --eval-interval 2"
LAYOUTS = {
    "one process": "",
    "recomputed": RECOMPUTED,
    "stages": "--pipeline-model-parallel-size 2",
    "tensor": "--tensor-model-parallel-size 2 --sequence-parallel",
    "sharded": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "experts": "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    "grouped experts": "--moe-grouped-gemm",
}
# "tiny" is quick, but has three of its layers, which two stages cannot share.
SMOKE = ("deepseek2_lite", "stages")
ALONE = ("one process", "recomputed", "grouped experts")
CASES = [
    ("llama32-1b", "linear_mxfp4", "one process", pytest.mark.slow),
    ("llama32-1b", "bf16", "tensor", pytest.mark.slow),
    ("deepseek2_lite", "FA_linear_mxfp8", "experts", pytest.mark.slow),
    *(("llama32-1b", "bf16", layout, pytest.mark.heavy) for layout in ("recomputed", "sharded")),
    # test_parallelism.py has stages of a HybridModel with tied embeddings.
    *(
        ("llama31-8b", "bf16", layout, pytest.mark.heavy)
        for layout in ("one process", "tensor", "stages")
    ),
    *(
        ("deepseek2_lite", "bf16", layout, pytest.mark.heavy)
        for layout in LAYOUTS
        if layout != "experts"  # above
    ),
]


@pytest.fixture(scope="module")
def train(tmp_path_factory, checkout_with):
    """A function that trains a cell; `rest` are arguments of `resolve`."""
    project = checkout_with(runs=tmp_path_factory.mktemp("hybrid") / "runs")

    def train(model, mode, layout, **rest):
        flags = f"{LENGTH} {LAYOUTS[layout]}".split()
        cluster = Cluster(nproc_per_node=1 if layout in ALONE else 2)
        training = "smoke" if (model, layout) == SMOKE else "tiny"
        cell = resolve(
            model, "wikipedia", mode, training, extra_flags=flags, cluster=cluster, **rest
        )
        return real_runs.run(project, cell)

    return train


@pytest.mark.parametrize(
    ("model", "mode", "layout"),
    [pytest.param(*case[:3], id=", ".join(case[:3]), marks=case[3]) for case in CASES],
)
def test_a_hybrid_model_trains_bit_for_bit_as_a_gpt(train, model, mode, layout):
    gpt, hybrid = (train(model, mode, layout, model_class=kind) for kind in (None, "hybrid"))
    ours = hybrid.read_metrics()
    theirs = {in_pattern(name): values for name, values in gpt.read_metrics().items()}
    assert len(theirs[TRAIN_LOSS]) == STEPS
    assert any(name.startswith("quant/") for name in theirs) == (mode != "bf16")
    clock = theirs.pop("iteration-time"), ours.pop("iteration-time")
    assert len(clock[0]) == len(clock[1])
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if ours[name] != theirs[name]] == []
