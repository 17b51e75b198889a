"""`mqo sensitivity` on a real run's checkpoint, and a training with the recipe that it writes."""

import json

import pytest
from mqo.launch.config import resolve

pytest.importorskip("torch")
pytest.importorskip("matplotlib")
from . import real_runs
from .real_runs import TINY, launched

pytestmark = pytest.mark.slow

MODEL = ("--model", "llama32-1b", "--training-config", "tiny")


@pytest.fixture(scope="module")
def run(checkout_with, tmp_path_factory):
    cell = resolve("llama32-1b", "wikipedia", "bf16", "smoke", extra_flags=TINY)
    return real_runs.run(checkout_with(runs=tmp_path_factory.mktemp("runs")), cell).root


def output(*words):
    done = launched("-m", "mqo", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_training_keeps_the_parts_that_changed_the_most(run, tmp_path):
    words = ("--mode", "FA_linear_mxfp4", "--by", "part", "--tokens", "256", "--rules", "40%")
    result = json.loads(output("sensitivity", run, *words, "-o", tmp_path / "kept.png", "--json"))
    everything, changes = result["everything"], result["changes"]
    sizes = [change["gradient"] for change in changes]
    assert sizes == sorted(sizes, reverse=True)
    assert min(sizes) > 0
    assert sum(change["weights"] for change in changes) == everything["weights"]
    kept, left = set(), 0.4 * everything["weights"]
    for change in changes:
        if change["weights"] <= left:
            left -= change["weights"]
            kept |= {change["name"]}
    assert kept
    recipe = ("--recipe", tmp_path / "kept.toml", "--allow-mostly-unquantized")
    products = json.loads(output("coverage", *MODEL, *recipe, "--json"))["products"]
    plain = {
        row["layer"] for row in products if row["gemm"] == "fprop" and row["quant_type"] == "none"
    }
    pattern = lambda layer: ".".join("*" if p.isdecimal() else p for p in layer.split("."))  # noqa: E731
    linear = {name for name in kept if not name.endswith("core_attention")}
    assert {pattern(layer) for layer in plain} == linear
    assert "kept" in output("train", *MODEL, "--dataset", "wikipedia", *recipe, "--dry-run")
