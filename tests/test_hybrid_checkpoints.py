"""A HybridModel continues a GPT's training, and programs read its checkpoints."""

import pytest
from mqo.launch import convert
from mqo.launch.config import Cluster
from mqo.launch.evaluation import evaluate, text
from mqo.launch.forward_pass import SavedModel
from mqo.runs import KD_LOSS, TRAIN_LOSS

pytest.importorskip("torch")
from .real_runs import continued, losses

STEPS = ("--train-samples", "24", "--global-batch-size", "4", "--save-interval", "2")
SHARDED = ("--use-distributed-optimizer",)
MODELS = [
    pytest.param("llama32-1b", (), marks=pytest.mark.heavy),
    pytest.param("deepseek2_lite", (), marks=pytest.mark.slow),
    pytest.param("llama31-8b", SHARDED, marks=pytest.mark.heavy),
    pytest.param("deepseek2_lite", SHARDED, marks=pytest.mark.heavy),
]


@pytest.mark.parametrize(("model", "flags"), MODELS)
def test_a_hybrid_model_continues_the_training_of_a_gpt(start, vendored, tmp_path, model, flags):
    """With its weights and optimizer: all losses are equal, and so is what programs read."""
    own = {"model": model, "training": "tiny", "flags": (*STEPS, *flags)}
    gpt = start("linear_mxfp4", checkpoint=tmp_path / "gpt", **own)
    own["model_class"] = "hybrid"
    folder = continued(tmp_path / "gpt", 2, tmp_path / "hybrid")
    hybrid = start("linear_mxfp4", checkpoint=folder, **own)
    trained, validated = losses(gpt)
    assert len(trained) == 6
    assert losses(hybrid) == (trained[2:], validated)
    saved = [tmp_path / "gpt", tmp_path / "hybrid"]
    models = [SavedModel.find(path) for path in saved]
    first, second = evaluate(vendored, models, ["mxfp8"], text(tokens=256))
    assert first.loss == second.loss
    folders = [tmp_path / "hf" / path.name for path in saved]
    for source, target in zip(saved, folders, strict=True):
        convert.megatron_to_hf(vendored.root, source, target)
    for name in ("config.json", "model.safetensors"):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


@pytest.mark.heavy
def test_a_hybrid_model_continues_in_another_layout(start, tmp_path):
    """From one process to tensor parallelism and two pipeline stages."""
    own = {"training": "tiny", "checkpoint": tmp_path / "gpt", "flags": STEPS}
    trained, _ = losses(start("linear_mxfp4", **own))
    parts = {
        "tensor": ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        "pipeline": ("--pipeline-model-parallel-size", "2"),
    }
    for name, flags in parts.items():
        folder = continued(tmp_path / "gpt", 2, tmp_path / name)
        own |= {"model_class": "hybrid", "checkpoint": folder, "flags": (*STEPS, *flags)}
        own["cluster"] = Cluster(nproc_per_node=2)
        rest, _ = losses(start("linear_mxfp4", **own))
        assert rest == [(step, pytest.approx(loss, rel=1e-3)) for step, loss in trained[2:]]


PAIRS = """
intermediate_layer_pairs: [[{student}, {teacher}, mse], [{norm}, decoder.final_layernorm]]
skip_lm_loss: false
"""


@pytest.mark.heavy
def test_a_student_learns_the_same_from_a_gpt_in_either_class(start, tmp_path):
    """Also from several micro-batches, for which outputs of the teacher are kept."""
    teacher = start("bf16", training="tiny", checkpoint=tmp_path / "teacher", flags=STEPS)
    names = {
        "gpt": {"student": "decoder.layers.1", "norm": "decoder.final_layernorm"},
        "hybrid": {"student": "decoder.layers.3", "norm": "decoder.final_norm"},
    }
    learned = []
    for model_class, layers in names.items():
        file = tmp_path / f"{model_class}.yaml"
        file.write_text(PAIRS.format(**layers, teacher="decoder.layers.1"))
        own = {"training": "tiny", "model_class": model_class, "distillation_config": file}
        flags = (*STEPS, "--micro-batch-size", "2")
        run = start("linear_mxfp4", teacher=teacher.root, flags=flags, **own)
        learned.append([run.read_metrics()[name] for name in (KD_LOSS, TRAIN_LOSS)])
    assert learned[0] == learned[1]
