"""The teacher: what it is built from, what it is loaded with, and how it runs."""

import json
import pickle
import sys

import pytest
import torch
from megatron.inference.checkpointing import accept_other_names, checkpoint_folder
from megatron.inference.gpt.model_provider import _teacher_provider
from megatron.inference.gpt.releases import build_gpt
from megatron.inference.gpt.teacher_config import load_teacher_config
from megatron.training.arguments import core_transformer_config_from_args
from mqo.megatron.layers import label_layers
from mqo.megatron.run.errors import DistillationError
from mqo.megatron.run.unpickle import CheckpointError
from mqo.quant import config

from .conftest import SEQUENCE, mode

PARTS = {"pre_process": True, "post_process": True, "parallel_output": True}
SIZES = "num_layers: 3\nhidden_size: 96\nffn_hidden_size: 160\nnum_attention_heads: 3\n"


@pytest.fixture
def folder(tmp_path):
    """A folder that looks as if it held a checkpoint."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    (tmp_path / "iter_0000007").mkdir()
    return tmp_path


def test_without_a_file_the_checkpoint_says_what_the_teacher_is(arguments, teacher):
    args = arguments()
    found = load_teacher_config(str(teacher[1]), args)
    assert [found.num_layers, found.hidden_size, found.num_attention_heads] == [3, 96, 3]
    # It follows from the teacher's sizes.
    assert core_transformer_config_from_args(found).kv_channels == 32
    assert args.num_layers == 2


def test_its_checkpoint_says_all_that_describes_it(arguments, teacher, monkeypatch):
    """The student's own values are others."""
    module = sys.modules[load_teacher_config.__module__]
    saved = module.read_arguments(teacher[1])
    change = {"layernorm_epsilon": 1e-3, "window_size": (4, 0), "softmax_type": "off-by-one"}
    change |= {"no_rope_freq": [0, 1, 1], "glu_linear_offset": 1.0, "qk_l2_norm": True}
    change |= {"config_logger_dir": "elsewhere", "bf16": True, "seed": 77}
    monkeypatch.setattr(module, "read_arguments", lambda folder: saved | change)
    args = arguments()
    found = vars(load_teacher_config(str(teacher[1]), args))
    for name in ("config_logger_dir", "bf16", "seed"):
        assert found[name] == getattr(args, name) != change.pop(name)
    assert {name: found[name] for name in change} == change


@pytest.mark.parametrize(
    "change",
    [{"hidden_size": "96"}, {"of_another_release": 1}, {"spec": ["os", "system"]}],
    ids=lambda change: next(iter(change)),
)
def test_arguments_of_another_kind_are_refused(arguments, teacher, monkeypatch, change):
    module = sys.modules[load_teacher_config.__module__]
    saved = module.read_arguments(teacher[1])
    monkeypatch.setattr(module, "read_arguments", lambda folder: saved | change)
    with pytest.raises(CheckpointError, match=next(iter(change))) as caught:
        load_teacher_config(str(teacher[1]), arguments())
    assert "--ignore-argument" not in str(caught.value)


@pytest.mark.parametrize(
    "line", ["rotary_percent: text", "num_query_groups: -1", "num_moe_experts: many", "swiglu: 3"]
)
def test_a_file_with_a_value_of_another_kind_is_refused(arguments, folder, line):
    (folder / "model_config.yaml").write_text(f"{SIZES}{line}\n")
    with pytest.raises((CheckpointError, DistillationError), match=line.split(":")[0]):
        load_teacher_config(str(folder), arguments())


def test_the_teacher_has_its_checkpoints_weights_and_is_frozen(arguments, teacher, tokens):
    args = arguments("--export-kd-teacher-load", teacher[1])
    args.iteration = 5
    config = load_teacher_config(str(teacher[1]), args)
    torch.manual_seed(9)
    built = _teacher_provider(config, PARTS)
    weights = dict(teacher[0].named_parameters())
    assert weights.keys() == dict(built.named_parameters()).keys()
    for name, weight in built.named_parameters():
        assert torch.equal(weight, weights[name]), name
        assert not weight.requires_grad
    assert not built.training
    assert (args.finetune, args.iteration, args.no_load_rng) == (False, 5, None)
    with torch.no_grad():
        both = [model(*tokens[0]) for model in (built, teacher[0])]
    assert torch.equal(*both)


def test_the_factory_and_its_arguments_can_be_pickled(arguments, teacher):
    args = arguments("--export-kd-teacher-load", teacher[1])
    given = load_teacher_config(str(teacher[1]), args)
    function, made, parts = pickle.loads(pickle.dumps((_teacher_provider, given, PARTS)))
    assert function is _teacher_provider
    assert (made.hidden_size, parts) == (96, PARTS)


def test_its_logits_are_bit_equal_while_its_student_quantizes(
    make, teacher, tokens, captured, quantized
):
    alone = teacher[0]
    label_layers(alone)
    as_if_quantized = captured(alone, tokens)
    quantized.reset()
    model = mode(make("--export-kd-teacher-load", teacher[1]), training=True)
    label_layers(model)
    found = captured(model, tokens, model.teacher_model)
    records = quantized.entries()
    assert {(r.site, r.quant_type) for r in records} == {
        (site, "mxfp4") for site in ("fprop", "qk", "pv")
    }
    assert {r.layer for r in records} == {
        *(f"decoder.layers.{n}.self_attention.core_attention" for n in range(2)),
        *(
            f"decoder.layers.{n}.self_attention.linear_{x}"
            for n in range(2)
            for x in ("qkv", "proj")
        ),
        *(f"decoder.layers.{n}.mlp.linear_{x}" for n in range(2) for x in ("fc1", "fc2")),
        "output_layer",
    }
    assert not torch.equal(found, as_if_quantized)  # had it been, that would have been seen
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(config.ENVIRONMENT_VARIABLE)
        config.reset()
        assert torch.equal(found, captured(alone, tokens))
    config.reset()


def test_a_file_in_nemos_names_is_translated(arguments, folder):
    (folder / "model_config.yaml").write_text(
        SIZES
        + "num_query_groups: 3\nbias: true\nactivation: fast-swiglu\nlayernorm_epsilon: 1e-6\n"
        f"share_embeddings_and_output_weights: false\nencoder_seq_length: {SEQUENCE}\n"
        "normalization: rmsnorm\nprecision: bf16\noptim: {name: adam}\n"
    )
    found = load_teacher_config(str(folder), arguments())
    names = (
        "add_bias_linear",
        "swiglu",
        "layernorm_epsilon",
        "untie_embeddings_and_output_weights",
    )
    assert [getattr(found, name) for name in names] == [True, True, 1e-6, True]
    assert (found.num_query_groups, found.normalization) == (3, "RMSNorm")
    assert not hasattr(found, "optim")


def block(heads_in_group, ffn_mult):
    return {
        "attention": {
            "no_op": False,
            "replace_with_linear": False,
            "n_heads_in_group": heads_in_group,
        },
        "ffn": {"no_op": ffn_mult is None, "replace_with_linear": False, "ffn_mult": ffn_mult},
    }


def test_layers_that_differ_are_built_as_they_are(arguments, folder):
    layers = {
        "hidden_act": "silu",
        "num_hidden_layers": 3,
        "hidden_size": 96,
        "num_attention_heads": 3,
        "tie_word_embeddings": True,
        "rope_theta": 10000,
        "rope_scaling": {"factor": 8.0},
        "block_configs": [block(3, 2.0), block(3, None), block(3, 8.0)],
    }
    (folder / "layers.json").write_text(json.dumps(layers))
    path = "heterogeneous_layers_config_path: layers.json\n"
    (folder / "model_config.yaml").write_text(SIZES + "num_query_groups: 1\n" + path)
    found = load_teacher_config(str(folder), arguments())
    built = build_gpt(found, **PARTS)
    widths = [getattr(layer.mlp, "linear_fc2", None) for layer in built.decoder.layers]
    assert widths[1] is None
    assert widths[0].weight.shape != widths[2].weight.shape


@pytest.mark.parametrize(
    "text, says",
    [
        ("num_layers: 3\n", "hidden_size, ffn_hidden_size, num_attention_heads"),
        (SIZES + "vocab_size: 99\n", " vocab_size .*99.*128"),
        (SIZES + "padded_vocab_size: 256\n", " padded_vocab_size .*256"),
        (SIZES + "seq_length: 16\n", "16.*32.*--seq-length 16"),
        (SIZES + "num_query_group: 1\n", "num_query_group[^s].*num_query_groups"),
        ("- a list", "mapping"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(arguments, folder, text, says):
    (folder / "model_config.yaml").write_text(text)
    with pytest.raises(DistillationError, match=f"(?s){says}"):
        load_teacher_config(str(folder), arguments())


def test_without_a_checkpoint_there_is_no_teacher(arguments, tmp_path):
    (tmp_path / "model_config.yaml").write_text(SIZES)
    with pytest.raises(DistillationError) as error:
        load_teacher_config(str(tmp_path), arguments())
    assert str(error.value) == (
        f"{tmp_path} has no checkpoint of a teacher. Expected: latest_checkpointed_iteration.txt "
        "in it, and the folder that it names."
    )


def test_the_tracker_or_nemos_folder_names_the_checkpoint(folder, tmp_path_factory):
    assert checkpoint_folder(folder).name == "iter_0000007"
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.write_text("release")
    assert checkpoint_folder(folder) is None
    (folder / "release").mkdir()
    assert checkpoint_folder(folder).name == "release"
    nemo = tmp_path_factory.mktemp("nemo")
    assert checkpoint_folder(nemo) is None
    (nemo / "model_weights").mkdir()
    assert checkpoint_folder(nemo).name == "model_weights"


def test_weights_in_transformer_engines_names_are_loaded(make):
    model, other = make(seed=3), make(seed=4)
    state = {
        "module."
        + name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace(
            "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"
        ): weight + 1
        for name, weight in model.state_dict().items()
        if weight is not None
    }
    accept_other_names(other)
    other.load_state_dict(state, strict=False)
    for name, weight in other.named_parameters():
        assert torch.equal(weight, dict(model.named_parameters())[name] + 1), name
