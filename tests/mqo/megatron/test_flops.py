"""The FLOPs in upstream's log: of HybridModels, against GPTs and against the products."""

import json
import sys
from pathlib import Path

import pytest
from mqo.launch import coverage
from mqo.launch.config import resolve
from mqo.launch.flags import vocabulary_flags
from mqo.matrix import tables
from mqo.overlay.series import Series

from ... import forking

PROGRAM = Path(__file__).with_name("count_flops.py")
# {model: layers that are no blocks of a GPT}
LAYERS = {"llama32-1b": "-**|-*--", "deepseek2_lite": "+E++-EE-E"}


def configured(model, training="standard", flags=(), **rest):
    return resolve(model, "wikipedia", "bf16", training, extra_flags=flags, **rest)


CASES = {
    (name, model_class): configured(name, model_class=model_class)
    for name in tables.script_models()
    for model_class in ("gpt", "hybrid")
}
CASES |= {
    (name, "layers"): configured(name, "tiny", ("--hybrid-layer-pattern", pattern))
    for name, pattern in LAYERS.items()
}


@pytest.fixture(scope="module")
def counted(vendored, tmp_path_factory):
    """{case: upstream's FLOPs of a micro-batch}, all of them by one process."""
    pytest.importorskip("torch")
    jobs = [
        coverage.one_process_flags(config, vocabulary_flags(config.experiment))
        for config in CASES.values()
    ]
    file = tmp_path_factory.mktemp("jobs") / "jobs.json"
    file.write_text(json.dumps(jobs))
    done = forking.run([sys.executable, "-W", "ignore", PROGRAM, vendored.root, file])
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", tables.script_models())
def test_a_hybrid_model_of_a_gpts_layers_has_its_flops(counted, name):
    # Sums of floats in another order.
    assert counted[name, "hybrid"] == pytest.approx(counted[name, "gpt"], rel=1e-12)


@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_of_a_pattern_is_counted_once(counted, vendored, checkout_with, tmp_path, name):
    """Upstream counts half of the scores and no router, but a latent's norm as a product."""
    config = CASES[name, "layers"]
    project = checkout_with(cache=tmp_path)
    products = coverage.of_config(project, vendored, Series.of_project(project), config).products
    scores = sum(p.flops for p in products if p.layer.endswith("core_attention"))
    routers = sum(p.flops for p in products if p.layer.endswith("router"))
    expected = sum(p.flops for p in products) - scores // 2 - routers
    model, training = config.experiment.model, config.experiment.training
    if model.mla:
        tokens = training.micro_batch * training.sequence
        expected += 6 * tokens * LAYERS[name].count("+") * model.mla.kv_lora_rank
    assert scores
    assert counted[name, "layers"] == pytest.approx(expected, rel=1e-12)
