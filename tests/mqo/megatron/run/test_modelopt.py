"""What of ModelOpt's a checkpoint brings back: where it is looked for, and what is refused."""

import sys
from argparse import Namespace

import pytest
import torch
from mqo.megatron.run import checkpoints, modelopt
from mqo.megatron.run.checkpoints import CheckpointError
from torch.nn import Linear, Sequential


@pytest.fixture
def folder(tmp_path):
    """A function that makes checkpoints of some iterations; those of `states` have ModelOpt's."""

    def make(name, *iterations, states=()):
        for iteration in iterations:
            path = tmp_path / name / f"iter_{iteration:07d}"
            path.mkdir(parents=True)
            if iteration in states:
                (path / modelopt.STATE).mkdir()
        (tmp_path / name / checkpoints.TRACKER).write_text(str(iterations[-1]))
        return tmp_path / name

    return make


def of(load=None, **rest):
    kept = {"save": None, "virtual_pipeline_model_parallel_size": None}
    return Namespace(**{"load": load and str(load), **kept, **rest})


def test_the_pretrained_model_counts_until_the_run_has_a_checkpoint(folder, tmp_path):
    own, before = tmp_path / "own", folder("before", 4)
    args = of(own, pretrained_checkpoint=str(before))
    assert checkpoints.newest(args) == before / "iter_0000004"
    assert checkpoints.newest(of(pretrained_checkpoint=str(before))) == before / "iter_0000004"
    folder("own", 2, 6)
    assert checkpoints.newest(args) == own / "iter_0000006"
    assert checkpoints.newest(of(own, ckpt_step=2)) == own / "iter_0000002"
    (own / checkpoints.TRACKER).write_text("release")
    assert checkpoints.newest(of(own)) == own / "release"
    assert checkpoints.newest(of()) is None


def test_without_a_state_nothing_happens_and_no_file_to_verify(folder, monkeypatch):
    monkeypatch.setattr(modelopt, "newest", lambda args: pytest.fail("was looked at"))
    model = Linear(2, 2)
    assert modelopt.restore(model, of(folder("plain", 4))) is model
    assert modelopt.restore(model, of()) is model


def test_the_state_of_another_iteration_is_not_this_ones(folder):
    model = Linear(2, 2)
    assert modelopt.restore(model, of(folder("some", 2, 4, states=[2]))) is model


def test_interleaved_chunks_are_refused(folder):
    args = of(folder("some", 4, states=[4]), virtual_pipeline_model_parallel_size=2)
    with pytest.raises(CheckpointError, match="--num-layers-per-virtual-pipeline-stage"):
        modelopt.restore(Linear(2, 2), args)


def test_the_state_of_a_gpt_is_refused_in_a_hybrid_model(folder):
    args = of(folder("some", 4, states=[4]), hybrid_layer_pattern="*-|*-")
    with pytest.raises(CheckpointError, match="HybridModel"):
        modelopt.restore(Linear(2, 2), args)


def test_a_state_that_would_run_something_is_refused(folder):
    args = of(folder("some", 4, states=[4]))
    # A pickle that says os.system.
    (checkpoints.newest(args) / modelopt.STATE / ".metadata").write_bytes(b"cos\nsystem\n.")
    with pytest.raises(CheckpointError, match=r"would run os\.system"):
        modelopt.restore(Linear(2, 2), args)


def test_nothing_is_saved_of_a_plain_model(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "modelopt.torch.opt", raising=False)
    modelopt.save([Linear(2, 2)], str(tmp_path), "torch")
    assert not any(tmp_path.iterdir())


class Quantizer(torch.nn.Module):
    """Looks like ModelOpt's, whose module it is said to be of."""

    __module__ = "modelopt.torch.quantization.nn.modules.tensor_quantizer"

    def __init__(self, on):
        super().__init__()
        self.is_enabled = on


def test_layers_are_named_where_a_quantizer_is_on():
    model = Sequential(Linear(2, 2), Linear(2, 2))
    model[0].weight_quantizer, model[0].input_quantizer = Quantizer(True), Quantizer(True)
    model[1].weight_quantizer = Quantizer(False)
    wrapped = torch.nn.ModuleDict({"module": torch.nn.ModuleDict({"module": model})})
    assert modelopt.quantized_layers([wrapped]) == ["0"]
    assert modelopt.quantized_layers([Linear(2, 2)]) == []


def quantized(*rows):
    keys = ("quantizer_name", "enable", "parent_class")
    table = [dict(zip(keys, row, strict=True)) for row in rows]
    return {"modelopt_state_dict": [("quantize", {"config": {"quant_cfg": table}}), ("export", {})]}


def test_a_state_is_described_by_its_rules():
    state = quantized(
        ("*", False, None), ("*weight_quantizer", True, None), ("*", False, "nn.Embedding")
    )
    rules = [("*", False), ("*weight_quantizer", True)]
    assert modelopt.describe_state(state, "int8") == {"format": "int8", "rules": rules}


def test_of_rules_that_depend_on_a_class_none_is_known():
    state = quantized(("*", False, None), ("*", True, "nn.Linear"))
    assert modelopt.describe_state(state, None) == {"format": None, "rules": []}
    older = {"modelopt_state_dict": [("quantize", {"config": {"quant_cfg": {"*": {}}}})]}
    assert modelopt.describe_state(older, "int8") == {"format": "int8", "rules": []}


@pytest.mark.parametrize("state", [{}, {"modelopt_state_dict": []}])
def test_a_state_that_quantizes_nothing_has_no_description(state):
    assert modelopt.describe_state(state, "int8") is None
    pruned = {"modelopt_state_dict": [("prune", {"config": {}})]}
    assert modelopt.describe_state(pruned, None) is None
