"""`mqo convert` around its program: one of our own stands in for it."""

import json
import sys
from itertools import pairwise

import pytest
from mqo import cli
from mqo.errors import ConvertError, RunError, SetupError
from mqo.launch import convert
from mqo.launch.hf_config import config_of, shape_of_config
from mqo.matrix import tables

# Does as it is told by files beside the source; else what the real one does, with small files.
PROGRAM = """
import json, os, sys
from pathlib import Path

command, source, target, *flags = sys.argv[1:]
told = Path(source) / "fail.json"
if command != "describe" and told.exists():
    Path(target, "half").write_text("written")
    if content := told.read_text():
        Path(os.environ["MQO_FAILURE"]).write_text(content)
    sys.exit("out of luck")
if command == "describe":
    Path(target).write_text((Path(source) / "args.json").read_text())
else:
    assert os.environ["HF_HUB_OFFLINE"] == "1" and "MQO_QUANT_CONFIG" not in os.environ
    Path(target, "weights").write_text(json.dumps([command, *flags]))
"""
ARGS = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "padded_vocab_size": 256,
    "untie_embeddings_and_output_weights": False,
    "layernorm_epsilon": 1e-5,
    "rotary_base": 10000,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "max_position_embeddings": 128,
    "bf16": True,
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree that holds nothing but the program; modelopt counts as installed."""
    (tmp_path / "tree/tools").mkdir(parents=True)
    (tmp_path / "tree/tools/convert.py").write_text(PROGRAM)
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("MQO_QUANT_CONFIG", "a run's")
    return tmp_path / "tree"


@pytest.fixture
def hf(tmp_path):
    """An HF folder with a tokenizer."""
    folder = tmp_path / "hf"
    folder.mkdir()
    config = config_of(tables.models()["llama32-1b"], "bf16", 8192) | {"eos_token_id": 7}
    for name, content in (("config.json", config), ("tokenizer.json", {"a": 1})):
        (folder / name).write_text(json.dumps(content))
    (folder / "model.safetensors").write_text("weights")
    return folder


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / convert.TRACKER).write_text("release")
    (folder / "args.json").write_text(json.dumps(ARGS))
    return folder


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_flags_are_those_of_the_config(tree, hf, tmp_path):
    made = convert.hf_to_megatron(tree, hf, tmp_path / "new/target")
    assert made.target == str(tmp_path / "new/target")
    command, *flags = json.loads((tmp_path / "new/target/weights").read_text())
    assert command == "to-megatron"
    pairs = dict(pairwise(flags))
    assert (pairs["--num-layers"], pairs["--rope-scaling-factor"]) == ("16", "32")
    assert (pairs["--vocab-size"], pairs["--transformer-impl"]) == ("128256", "local")
    # The last counts: no row of padding, which the file does not have.
    assert flags[-1] == "1"
    assert "--vocab-size" not in made.flags
    assert names(tmp_path / "new") == ["target"]


def test_a_folder_gets_its_config_and_tokenizer(tree, hf, checkpoint, tmp_path):
    convert.megatron_to_hf(tree, checkpoint, tmp_path / "target", tokenizer=hf, vocab_size=250)
    assert names(tmp_path / "target") == ["config.json", "tokenizer.json", "weights"]
    config = json.loads((tmp_path / "target/config.json").read_text())
    assert shape_of_config(config).vocab_size == 250
    assert (config["torch_dtype"], config["max_position_embeddings"]) == ("bfloat16", 128)
    assert (config["eos_token_id"], config["bos_token_id"]) == (7, None)
    flags = json.loads((tmp_path / "target/weights").read_text())
    assert flags[0] == "to-hf"
    assert flags[-1] == "--bf16"


def test_what_is_written_may_be_read_by_others_as_far_as_its_folder(tmp_path):
    with convert.staged(tmp_path / "target") as folder:
        (folder / "deep").mkdir()
        (folder / "deep/weights").touch(mode=0o600)
    files = (tmp_path / "target/deep/weights").stat().st_mode
    assert files & 0o666 == (tmp_path / "target").stat().st_mode & 0o666


def test_a_run_is_its_checkpoints(tree, checkpoint, tmp_path):
    (tmp_path / "run").mkdir()
    checkpoint.rename(tmp_path / "run/checkpoints")
    convert.megatron_to_hf(tree, tmp_path / "run", tmp_path / "target")
    assert names(tmp_path / "target") == ["config.json", "weights"]


def test_without_a_tokenizer_no_id_is_made_up(tree, checkpoint, tmp_path):
    convert.megatron_to_hf(tree, checkpoint, tmp_path / "target")
    config = json.loads((tmp_path / "target/config.json").read_text())
    assert (config["eos_token_id"], config["vocab_size"]) == (None, 256)
    assert names(tmp_path / "target") == ["config.json", "weights"]


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ('{"found": "2 tensors are missing", "expected": "9"}', ConvertError, "2 tensors are mis"),
        ("", RunError, "exit code 1: out of luck"),
    ],
)
def test_a_failure_is_told_and_leaves_nothing(tree, hf, tmp_path, content, error, message):
    (hf / "fail.json").write_text(content)
    with pytest.raises(error, match=message):
        convert.hf_to_megatron(tree, hf, tmp_path / "target")
    assert names(tmp_path) == ["hf", "tree"]


def test_a_target_that_is_there_is_left_as_it_is(tree, hf, checkpoint, tmp_path):
    (tmp_path / "target").mkdir()
    with pytest.raises(ConvertError, match="is there already"):
        convert.hf_to_megatron(tree, hf, tmp_path / "target")
    with pytest.raises(ConvertError, match="is there already"):
        convert.megatron_to_hf(tree, checkpoint, tmp_path / "target")
    assert names(tmp_path / "target") == []


def test_a_source_that_is_none_is_refused(tree, hf, checkpoint, tmp_path):
    target = tmp_path / "target"
    with pytest.raises(ConvertError, match=r"no config\.json"):
        convert.hf_to_megatron(tree, checkpoint, target)
    with pytest.raises(ConvertError, match=f"no {convert.TRACKER}"):
        convert.megatron_to_hf(tree, hf, target)
    with pytest.raises(ConvertError, match="no folder"):
        convert.megatron_to_hf(tree, checkpoint, target, tokenizer=tmp_path / "absent")
    (hf / "config.json").write_text("{")
    with pytest.raises(ConvertError, match="is no JSON"):
        convert.hf_to_megatron(tree, hf, target)


def test_without_modelopt_the_command_to_install_it_is_told(tree, hf, tmp_path, monkeypatch):
    monkeypatch.setattr(convert.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"pip install .*modelopt"):
        convert.hf_to_megatron(tree, hf, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_the_command_prints_the_target_and_the_flags(tree, hf, tmp_path, monkeypatch, capsys):
    words = ["convert", "hf-to-megatron", str(hf), str(tmp_path / "target"), "--tree", str(tree)]
    monkeypatch.setattr(sys, "argv", ["mqo", *words])
    with pytest.raises(SystemExit) as left:
        cli.main()
    out = capsys.readouterr().out.splitlines()
    assert left.value.code in (0, None)
    assert out[0] == str(tmp_path / "target")
    assert out[1].startswith("model flags: --num-layers 16")


def test_each_stage_of_the_program_has_a_line(tree, hf, tmp_path):
    """The program waits with each stage until its line was printed."""
    waits = """
told = iter(("told 1", "told 2"))
for number, what in ((1, "building the model"), (2, "reading 3 tensors")):
    facts = json.dumps({"what": what, "done": number, "total": 2})
    Path(os.environ["MQO_PROGRESS"]).write_text(facts)
    seen = Path(source, next(told))
    while not seen.exists():
        os.sched_yield()
"""
    (tree / "tools/convert.py").write_text(PROGRAM + waits)
    said = []

    def report(line):
        said.append(line)
        (hf / f"told {len(said)}").touch()

    convert.hf_to_megatron(tree, hf, tmp_path / "target", report)
    assert said == ["  1/2  building the model", "  2/2  reading 3 tensors"]
