"""The student, with and without a teacher, with ModelOpt's state, and after its distillation."""

from types import SimpleNamespace

import modelopt.torch.distill as mtd
import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.inference.checkpointing import FUSED_NORMS, load_modelopt_state
from megatron.inference.gpt.model_provider import (
    check_lm_loss,
    check_run,
    check_stages,
    model_provider,
)
from mqo.megatron.run.errors import DistillationError
from mqo.megatron.run.modelopt import make_portable


def test_without_a_teacher_it_is_upstreams_model(make):
    assert type(make()) is GPTModel


@pytest.mark.parametrize("first, last", [(True, False), (False, True)])
def test_a_stage_has_its_ends_alone(make, first, last):
    model = make(pre_process=first, post_process=last)
    assert hasattr(model, "embedding") == first
    assert hasattr(model, "output_layer") == last


@pytest.mark.parametrize("parallel", [True, False])
def test_logits_are_gathered_if_they_are_not_to_stay_parallel(make, parallel):
    model = make(parallel_output=parallel)
    assert model.parallel_output is parallel
    assert model.output_layer.gather_output is not parallel


def test_with_a_teacher_the_same_student_learns_from_it(make, teacher):
    plain = make()
    model = make("--export-kd-teacher-load", teacher[1])
    assert isinstance(model, mtd.DistillationModel)
    assert isinstance(model, GPTModel)
    assert model.teacher_model.config.hidden_size == 96
    own = dict(model.named_parameters())
    for name, weight in plain.named_parameters():
        assert torch.equal(own[name], weight), name  # the teacher takes none of its random numbers


def test_a_students_checkpoint_is_a_plain_models(make, save, teacher, tmp_path):
    from megatron.training import get_args
    from megatron.training.checkpointing import load_checkpoint

    config = tmp_path / "kd.yaml"
    config.write_text("intermediate_layer_pairs: [[decoder.layers.0, decoder.layers.0]]\n")
    flags = ("--export-kd-teacher-load", teacher[1], "--export-kd-cfg", config)
    student = make(*flags)
    folder = save(student, tmp_path / "saved")
    of_student = dict(student.named_parameters())
    resumed, plain = make(*flags, seed=5), make("--load", folder, seed=6)
    for model in (plain, resumed):
        get_args().load = str(folder)
        load_checkpoint([model], None, None)
    for name, weight in plain.named_parameters():
        assert torch.equal(weight, of_student[name]), name
    for name, weight in resumed.named_parameters():
        assert torch.equal(weight, of_student[name]), name  # the projection's, too


def test_a_student_loads_weights_with_other_names(make):
    weights = make(seed=7).state_dict()
    fused = {ours: theirs for theirs, ours in FUSED_NORMS.items()}
    renamed = {}
    for name, weight in weights.items():
        for ours, theirs in fused.items():
            name = name.replace(ours, theirs)
        renamed[name] = weight
    assert renamed.keys() != weights.keys()
    model = make()
    model.load_state_dict(renamed)
    for name, weight in model.state_dict().items():
        assert weight is None or torch.equal(weight, weights[name]), name


def test_finalizing_gives_the_clean_student(make, teacher, monkeypatch):
    flags = ("--export-kd-teacher-load", teacher[1], "--export-kd-finalize")
    assert type(make(*flags)) is GPTModel
    model = make("--export-kd-teacher-load", teacher[1])
    from megatron.inference.gpt import releases

    monkeypatch.setattr(releases, "build_gpt", lambda *args, **parts: model)
    releases.get_args().export_kd_finalize = True
    clean = model_provider()
    assert type(clean) is GPTModel
    assert not [name for name, _ in clean.named_parameters() if "teacher" in name or "loss" in name]


def test_modelopts_state_of_the_checkpoint_is_restored(make, save, tmp_path):
    import modelopt.torch.opt as mto
    import modelopt.torch.quantization as mtq

    folder = tmp_path / "saved"
    assert load_modelopt_state(folder) == {}
    model = make()
    save(model, folder)
    assert load_modelopt_state(folder) == {}
    assert not mto.ModeloptStateManager.is_converted(make("--load", folder))
    make_portable()
    quantized = mtq.quantize(make(), mtq.INT8_WEIGHT_ONLY_CFG, None)
    save(quantized, folder)
    state = load_modelopt_state(folder)
    assert state["modelopt_state_dict"][0][0] == "quantize"
    assert mto.ModeloptStateManager.is_converted(make("--load", folder))


@pytest.mark.parametrize(
    "text, says",
    [
        ("logit_layers: [output_layer, head]", r"teacher .* head\. .*embedding"),
        (
            "intermediate_layer_pairs: [[decoder.layers.1.mpl, decoder.layers.0.mlp]]",
            r"student .* decoder\.layers\.1\.mpl.*decoder\.layers\.1\.mlp",
        ),
        (
            "intermediate_layer_pairs: [[decoder.layers.2, decoder.layers.0]]",
            r"student .* decoder\.layers\.2\..*decoder\.layers\.1",
        ),
    ],
)
def test_a_layer_that_does_not_exist_is_named_with_near_ones(make, teacher, tmp_path, text, says):
    (tmp_path / "kd.yaml").write_text(text)
    flags = ("--export-kd-teacher-load", teacher[1], "--export-kd-cfg", tmp_path / "kd.yaml")
    with pytest.raises(DistillationError, match=says):
        make(*flags)


@pytest.mark.parametrize(
    "name, flag",
    [
        ("virtual_pipeline_model_parallel_size", "per-virtual-pipeline-stage"),
        ("calculate_per_token_loss", "calculate-per-token-loss"),
    ],
)
def test_what_no_distillation_does_is_refused(name, flag):
    args = {"virtual_pipeline_model_parallel_size": None, "calculate_per_token_loss": False}
    check_run(SimpleNamespace(**args))
    with pytest.raises(DistillationError, match=flag):
        check_run(SimpleNamespace(**args | {name: 2}))


def test_a_hybrid_model_in_pipeline_stages_is_refused():
    """As the student, or as its teacher."""
    gpt = {"hybrid_layer_pattern": None, "pipeline_model_parallel_size": 2}
    hybrid = SimpleNamespace(**gpt | {"hybrid_layer_pattern": "*-|*-"})
    check_stages(SimpleNamespace(**gpt), SimpleNamespace(**gpt))
    for pair in ((hybrid, SimpleNamespace(**gpt)), (SimpleNamespace(**gpt), hybrid)):
        with pytest.raises(DistillationError, match="HybridModel"):
            check_stages(*pair)
    hybrid.pipeline_model_parallel_size = 1
    check_stages(hybrid, hybrid)


@pytest.mark.parametrize(
    "impl, dtype, refused",
    [
        ("native", torch.float32, True),
        ("native", torch.bfloat16, False),
        ("te", torch.bfloat16, True),
    ],
)
def test_a_loss_that_overwrites_the_compared_logits_is_refused(impl, dtype, refused):
    args = SimpleNamespace(
        cross_entropy_loss_fusion=True, cross_entropy_fusion_impl=impl, params_dtype=dtype
    )
    if refused:
        with pytest.raises(DistillationError, match="no --cross-entropy-loss-fusion"):
            check_lm_loss(args)
        args.cross_entropy_loss_fusion = False
    check_lm_loss(args)


def test_only_a_student_with_a_loss_of_its_own_is_refused_the_fused_one(make, teacher, tmp_path):
    flags = ["--export-kd-teacher-load", teacher[1], "--cross-entropy-loss-fusion"]
    make(*flags)
    (tmp_path / "kd.yaml").write_text("skip_lm_loss: false")
    with pytest.raises(DistillationError, match="no --cross-entropy-loss-fusion"):
        make(*flags, "--export-kd-cfg", tmp_path / "kd.yaml")
