import importlib.util
import json
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.extensions import transformer_engine
from mqo.megatron.run import implementation
from mqo.megatron.run.files import QUANTIZERS, RunFiles
from mqo.megatron.run.implementation import (
    ImplementationError,
    check_available,
    implementation_of,
    record,
)
from torch import nn


class Chunk(nn.Module):
    """A part of a model, with its configuration as upstream keeps it."""

    def __init__(self, *norms, **settings):
        super().__init__()
        self.norms, self.config = nn.ModuleList(norms), SimpleNamespace(**settings)


def optimizer(*kinds):
    """Upstream's optimizer of several, each around one of `kinds`."""
    parameter = nn.Parameter(torch.zeros(1))
    return SimpleNamespace(
        chained_optimizers=[SimpleNamespace(optimizer=kind([parameter])) for kind in kinds]
    )


# -- layers that cannot be had -----------------------------------------------------------------


@pytest.mark.parametrize("asked", ["transformer_engine", "inference_optimized"])
def test_transformer_engine_without_a_gpu_is_refused(asked):
    with pytest.raises(ImplementationError, match=rf"{asked} .*CUDA"):
        check_available(Namespace(transformer_impl=asked))


@pytest.mark.parametrize("installed", [False, True])
def test_on_a_gpu_it_is_said_whether_it_is_missing_or_broken(installed, tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("transformer_engine", tmp_path / "broken.py")
    monkeypatch.setattr(implementation, "HAS_CUDA", True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if installed else None)
    with pytest.raises(ImplementationError) as caught:
        check_available(Namespace(transformer_impl="transformer_engine"))
    assert ("broken.py" in str(caught.value)) == installed


def test_what_is_there_is_not_refused(monkeypatch):
    check_available(Namespace(transformer_impl="local"))
    check_available(Namespace())
    monkeypatch.setattr(transformer_engine, "HAVE_TE", True)
    check_available(Namespace(transformer_impl="transformer_engine"))


# -- what was taken ----------------------------------------------------------------------------


def test_norms_optimizers_and_fusions_are_named_by_package():
    chunks = [
        Chunk(nn.RMSNorm(2), nn.RMSNorm(2), bias_fusion=True, rope_fusion=False, fused_as="no"),
        Chunk(nn.LayerNorm(2)),
    ]
    assert implementation_of(chunks, optimizer(torch.optim.AdamW, torch.optim.AdamW)) == {
        "norms": ["torch.LayerNorm", "torch.RMSNorm"],
        "optimizers": ["torch.AdamW"],
        "fusions": ["bias_fusion"],
    }


def test_quantizers_of_modelopt_are_named_only_if_they_are_on():
    kind = type("Quantizer", (nn.Module,), {"__module__": "modelopt.torch.quantization.nn"})
    chunk, quantizer = Chunk(nn.RMSNorm(2)), kind()
    chunk.weight_quantizer = quantizer
    quantizer.is_enabled = False
    assert QUANTIZERS not in implementation_of([chunk], None)
    quantizer.is_enabled = True
    assert implementation_of([chunk], None)[QUANTIZERS] == ["ModelOpt"]


def test_a_single_optimizer_is_named_as_one_of_several_is():
    one = SimpleNamespace(optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1))
    assert implementation_of([], one)["optimizers"] == ["torch.SGD"]
    assert implementation_of([], None)["optimizers"] == []


def test_it_is_written_to_the_run_folder_and_printed(run, capsys):
    folder = run()
    record([Chunk(nn.RMSNorm(2))], None)
    assert json.loads(RunFiles(folder).implementation.read_text())["norms"] == ["torch.RMSNorm"]
    assert "torch.RMSNorm" in capsys.readouterr().out


def test_without_a_run_folder_nothing_is_said(capsys):
    record([Chunk(nn.RMSNorm(2))], None)
    assert capsys.readouterr().out == ""


def test_the_ranks_of_a_pipeline_are_named_together(run, monkeypatch):
    folder = run()
    other = {"norms": ["torch.LayerNorm"], "optimizers": [], "fusions": ["b"]}
    monkeypatch.setattr(implementation, "all_ranks", lambda here: [here, other])
    record([Chunk(nn.RMSNorm(2), a_fusion=True)], None)
    assert json.loads(RunFiles(folder).implementation.read_text()) == {
        "norms": ["torch.LayerNorm", "torch.RMSNorm"],
        "optimizers": [],
        "fusions": ["a_fusion", "b"],
    }
