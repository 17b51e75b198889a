"""The configuration of a distillation, and a distillation model under Megatron's hands."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.inference.algos import distillation
from megatron.inference.algos.distillation import load_distillation_config, widened_shapes
from mqo.megatron.layers import find_layers, other_weights
from mqo.megatron.run.errors import DistillationError
from mqo.quant.labels import is_exempt

from .conftest import mode

PAIRS = """
intermediate_layer_pairs:
  - [decoder.layers.0, decoder.layers.1]
  - [decoder.final_layernorm, decoder.final_layernorm, mse]
skip_lm_loss: {skip}
"""


def config(layers=4, width=8, stages=1):
    return TransformerConfig(
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=2,
        pipeline_model_parallel_size=stages,
        pipeline_dtype=torch.float32,
    )


def loaded(tmp_path, text, student=None, teacher=None):
    (tmp_path / "kd.yaml").write_text(text)
    return load_distillation_config(
        str(tmp_path / "kd.yaml"), student or config(), teacher or config(6, 12)
    )


# -- the configuration


def test_by_default_the_logits_alone_are_compared():
    found = load_distillation_config(None, config(), config())
    assert [type(loss).__name__ for loss in found["criterion"].values()] == ["LogitsKLLoss"]
    assert list(found["criterion"]) == [("output_layer", "output_layer")]
    assert found["skip_lm_loss"] is True
    assert found["loss_balancer"].skip_original_loss is True
    assert found["loss_balancer"].kd_loss_scale == 1
    assert found["balance"] == "step"


def test_a_file_names_the_pairs_their_losses_and_the_weights(tmp_path):
    text = PAIRS.format(skip="false") + "kd_loss_scale: 0.25\ntemperature: 2\n"
    found = loaded(tmp_path, text)
    kinds = {pair: type(loss).__name__ for pair, loss in found["criterion"].items()}
    assert kinds == {
        ("output_layer", "output_layer"): "LogitsKLLoss",
        ("decoder.layers.0", "decoder.layers.1"): "HiddenStateCosineLoss",
        ("decoder.final_layernorm", "decoder.final_layernorm"): "HiddenStateMSELoss",
    }
    shapes = [[list(w.shape) for w in loss.parameters()] for loss in found["criterion"].values()]
    assert shapes == [[], [[12, 8], [12]], [[12, 8], [12]]]
    assert found["loss_balancer"].kd_loss_scale == 0.25


@pytest.mark.parametrize("other, overwrites", [("final_layernorm", True), ("head", False)])
def test_logits_of_the_teacher_that_two_pairs_read_are_not_overwritten(
    tmp_path, monkeypatch, other, overwrites
):
    given = []
    monkeypatch.setattr(distillation, "chunked_kl", lambda *of: given.append(of) or of[0].sum(-1))
    text = f"logit_layers: [head, head]\nintermediate_layer_pairs: [[decoder, {other}]]"
    loss = loaded(tmp_path, text)["criterion"]["head", "head"]
    loss(torch.ones(3, 2, 4), torch.ones(3, 2, 4))
    assert given[0][-1] is overwrites


@pytest.mark.parametrize(
    "text, says",
    [
        ("skip_lm_los: true", r"keys skip_lm_los\. .*skip_lm_loss"),
        ("[1, 2]", "mapping.*logit_layers"),
        ("a: [", "cannot be read"),
        ("kd_loss_scale: 0", "kd_loss_scale is 0"),
        ("temperature: hot", "temperature is 'hot'"),
        ("skip_lm_loss: 1", "skip_lm_loss is 1.*true or false"),
        ("balance: batch", "balance is 'batch'.*step or micro_batch"),
        ("logit_layers: [output_layer]", r"logit_layers is \['output_layer'\]"),
        ("intermediate_layer_pairs: [[a, b, l1]]", "pairs is .*'l1'.*cosine or mse"),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_what_is_valid(tmp_path, text, says):
    with pytest.raises(DistillationError, match=f"(?s){says}"):
        loaded(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DistillationError, match=r"gone\.yaml"):
        load_distillation_config(str(tmp_path / "gone.yaml"), config(), config())


@pytest.fixture
def stage(monkeypatch):
    """A function that says whether this is the last of the pipeline's stages."""

    def be(last):
        groups = SimpleNamespace(is_pipeline_last_stage=lambda ignore_virtual: last)
        monkeypatch.setattr(distillation, "parallel_state", groups)

    return be


def test_layers_have_the_last_stages_names_there_and_no_losses_elsewhere(tmp_path, stage):
    text = "intermediate_layer_pairs: [[decoder.layers.3.mlp, decoder.layers.4.mlp]]"
    student, teacher = config(4, stages=2), config(6, 12, stages=2)
    stage(last=True)
    found = loaded(tmp_path, text, student, teacher)
    assert list(found["criterion"])[1] == ("decoder.layers.1.mlp", "decoder.layers.1.mlp")
    stage(last=False)
    assert loaded(tmp_path, text, student, teacher)["criterion"] == {}


@pytest.mark.parametrize("last", [True, False])
def test_a_pair_that_no_stage_holds_is_refused_on_every_rank(tmp_path, stage, last):
    stage(last=last)
    text = "intermediate_layer_pairs: [[decoder.layers.3, decoder.layers.2]]"
    with pytest.raises(DistillationError, match=r"layers\.2 .*2 pipeline stages.*layers 3 to 5"):
        loaded(tmp_path, text, config(4, stages=2), config(6, stages=2))


# -- the model


@pytest.fixture(scope="module")
def distil(make, teacher, tmp_path_factory):
    """A function that builds a student of the teacher."""
    folder = tmp_path_factory.mktemp("configurations")

    def build(skip="true", seed=1):
        path = folder / f"{skip}.yaml"
        path.write_text(PAIRS.format(skip=skip))
        flags = ("--export-kd-teacher-load", teacher[1], "--export-kd-cfg", path)
        return mode(make(*flags, seed=seed), training=True)

    return build


def losses(model, tokens):
    """What the student's own loss was, and those of the pairs."""
    output = model(*tokens[0], labels=tokens[1])
    return output, model.compute_kd_loss(loss_reduction_fn=torch.mean, skip_balancer=True)


def test_the_teacher_learns_nothing_and_is_saved_nowhere(distil, tokens):
    model = distil("false")
    output, parts = losses(model, tokens)
    (output.mean() + sum(parts.values())).backward()
    of_teacher = {name for name, _ in model.named_parameters() if "_teacher_model" in name}
    assert of_teacher
    for name, weight in model.named_parameters():
        assert weight.requires_grad == (name not in of_teacher)
        assert (weight.grad is not None) == (name not in of_teacher), name
    assert not model.teacher_model.training
    for state in (model.state_dict(), model.sharded_state_dict()):
        assert not [name for name in state if "_teacher" in name]
    assert "_loss_modules.1._projection.weight" in model.sharded_state_dict()
    assert model.teacher_model is not None  # it is hidden for as long as it is saved


def test_quantizers_find_the_student_alone(distil):
    model = distil()
    names = {found.layer.name for found in find_layers(model)}
    assert "decoder.layers.1.mlp.linear_fc2" in names
    assert not [name for name in names if "_teacher" in name or "_loss" in name]
    assert not other_weights(model)
    assert all(is_exempt(part) for part in model.teacher_model.modules())


def test_the_projections_stand_in_the_order_of_the_pairs(distil):
    model = distil()
    kinds = [type(loss).__name__ for loss in model.loss_modules]
    assert kinds == ["HiddenStateCosineLoss", "HiddenStateMSELoss"]


def test_the_own_loss_has_a_gradient_only_if_it_is_trained_on(distil, tokens):
    model = distil("true")
    plain = mode(model, training=False)(*tokens[0], labels=tokens[1])
    assert plain.min() > 0
    skipped = mode(model, training=True)(*tokens[0], labels=tokens[1])
    trained = distil("false")(*tokens[0], labels=tokens[1])
    assert (skipped.requires_grad, trained.requires_grad) == (False, True)
    for loss in (skipped, trained):
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, plain)


def test_the_own_loss_leaves_the_logits_that_are_compared(distil, tokens):
    """Upstream's cross entropy works in place where logits are fp32."""
    found = [losses(distil(skip), tokens)[1]["LogitsKLLoss_0"].item() for skip in ("true", "false")]
    assert found[0] == found[1] > 0


def test_evaluation_does_without_the_teacher(distil, tokens):
    model = mode(distil(), training=False)
    calls = []
    model.teacher_model.register_forward_hook(lambda *of: calls.append(of))
    model(*tokens[0], labels=tokens[1])
    assert not calls


def test_the_compared_outputs_are_the_two_models_own(distil, teacher, tokens, captured):
    model = distil()
    for layer, theirs in model._layers_to_loss:
        assert layer in model.modules()
        assert theirs in model.teacher_model.modules()
    alone = captured(teacher[0], tokens)
    torch.testing.assert_close(captured(model, tokens, model.teacher_model), alone, rtol=0, atol=0)


def test_between_stages_both_hidden_states_go_side_by_side(distil, monkeypatch):
    model, given = distil(), {}
    widen = widened_shapes(model)
    assert widen([(32, 2, 64)], [(32, 2, 64)]) == ([(32, 2, 160)], [(32, 2, 160)])
    for whose in (model, model.teacher_model):
        take = partial(given.__setitem__, whose)
        monkeypatch.setattr(whose.decoder, "set_input_tensor", take)
    sent = torch.cat([torch.zeros(32, 2, 64), torch.ones(32, 2, 96)], -1)
    model.set_input_tensor([sent])
    ours, theirs = given[model], given[model.teacher_model]
    assert (ours.shape[-1], theirs.shape[-1]) == (64, 96)
    assert theirs.all()
    assert not ours.any()
