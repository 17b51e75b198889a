"""Tokenizers, configurations and weights from elsewhere: no code in them runs."""

import json
import struct
import traceback
from argparse import Namespace

import pytest
from megatron.inference import load_model
from megatron.inference.algos import distillation
from megatron.inference.gpt import teacher_config
from mqo.errors import RunError
from mqo.megatron.run import hf_kind
from mqo.megatron.run.args_table import read_table
from mqo.megatron.run.errors import DistillationError
from mqo.project import Project
from mqo.report import stats

TYPES = {"AutoConfig": "code.Config", "AutoTokenizer": ["code.Tokenizer", None]}
TAG = "!!python/object/apply:os.system ['touch {}']\n"


@pytest.fixture
def marker(tmp_path):
    """The file that code makes, if it runs."""
    return tmp_path / "ran"


@pytest.fixture
def folder(tmp_path, marker):
    """A tokenizer and a configuration that name classes of a file beside them."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "code.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: ...\n")
    config = {"model_type": "somebodys", "auto_map": TYPES}
    (made / "config.json").write_text(json.dumps(config))
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


def test_the_code_of_a_tokenizer_does_not_run_whatever_the_checkpoint_says(folder, marker):
    there = Namespace(**dict.fromkeys(read_table().needed, 1), trust_remote_code=True, bf16=True)
    args = load_model.arguments_here(folder, there, [])
    assert args.bf16
    assert not args.trust_remote_code
    with pytest.raises(load_model.SavedError, match="its own code") as caught:
        load_model.tokenizer_of(args, folder)
    assert "trust_remote_code" not in "".join(traceback.format_exception(caught.value))
    assert not marker.exists()


def test_the_code_of_a_configuration_is_refused_without_advice_to_run_it(folder, marker):
    with pytest.raises(load_model.SavedError, match=r"config\.json: .*its own code") as caught:
        hf_kind.check_config(folder)
    assert "trust_remote_code" not in "".join(traceback.format_exception(caught.value))
    assert not marker.exists()


def test_the_code_of_a_configuration_does_not_run_in_a_conversion(folder, marker):
    importer = pytest.importorskip("modelopt.torch.export.plugins.megatron_importer")
    with pytest.raises(ValueError, match="trust_remote_code"):
        importer.GPTModelImporter(None, str(folder))
    assert not marker.exists()


@pytest.mark.parametrize("read", [teacher_config._read_yaml, distillation._read])
def test_a_tag_in_a_yaml_file_does_not_run(tmp_path, marker, read):
    path = tmp_path / "config.yaml"
    path.write_text("num_layers: " + TAG.format(marker))
    with pytest.raises(DistillationError, match="config"):
        read(path)
    assert not marker.exists()


@pytest.mark.parametrize("size", [2**63, 2**40, 2**20])
def test_a_safetensors_header_of_absurd_size_is_refused(tmp_path, size):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", size) + b"{}")
    with pytest.raises(RunError, match=r"model\.safetensors"):
        stats.measure(Project.here().tree, path, [], None)
