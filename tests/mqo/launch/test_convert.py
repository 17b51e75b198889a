"""`mqo convert` around its program: one of our own stands in for it."""

import importlib.util
import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from mqo.errors import ConvertError, DiskFullError, RunError, SetupError
from mqo.launch import convert
from mqo.launch.hf_config import config_of, shape_of_config
from mqo.matrix import tables
from tokenizers import Tokenizer, models

# Does as it is told by files beside the source; else what the real one does, with small files.
PROGRAM = """
import json, os, sys
from functools import partial
from pathlib import Path

def describe(checkpoint: Path):
    return {"arguments": json.loads((checkpoint / "args.json").read_text()), "parser": {}}

def write(command: str, source: Path, target: Path, flags: list[str]):
    told = source / "fail.json"
    if told.exists():
        (target / "half").write_text("written")
        if content := told.read_text():
            Path(os.environ["MQO_FAILURE"]).write_text(content)
        sys.exit("out of luck")
    assert os.environ["HF_HUB_OFFLINE"] == "1" and "MQO_QUANT_CONFIG" not in os.environ
    (target / "weights").write_text(json.dumps([command, *flags]))

to_megatron, to_hf, finalize = (
    partial(write, command) for command in ("to-megatron", "to-hf", "finalize")
)
"""
ARGS = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "padded_vocab_size": 256,
    "make_vocab_size_divisible_by": 128,
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
WITH_TOKENIZER = ["README.md", "config.json", "generation_config.json"]
WITH_TOKENIZER += ["tokenizer.json", "tokenizer_config.json", "weights"]


def modelopt_is(spec):
    """A find_spec that gives `spec` for modelopt."""
    find = importlib.util.find_spec
    return lambda name: spec if name == "modelopt" else find(name)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree that holds nothing but the program; modelopt counts as installed."""
    (tmp_path / "tree/tools").mkdir(parents=True)
    (tmp_path / "tree/tools/convert.py").write_text(PROGRAM)
    monkeypatch.setattr(importlib.util, "find_spec", modelopt_is("there"))
    monkeypatch.setenv("MQO_QUANT_CONFIG", "a run's")
    return tmp_path / "tree"


@pytest.fixture
def hf(tmp_path):
    """An HF folder with a tokenizer of 250 tokens."""
    folder = write_tokenizer(tmp_path / "hf", 250)
    config = config_of(tables.models()["llama32-1b"], "bf16", 8192) | {"eos_token_id": 7}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / convert.TRACKER).write_text("release")
    (folder / "args.json").write_text(json.dumps(ARGS))
    return folder


def write_tokenizer(folder, size):
    """A tokenizer's folder with as many tokens; 0 ends a document, 1 is padding."""
    folder.mkdir()
    words = {"<end>": 0, "<pad>": 1} | {f"w{i}": i for i in range(2, size)}
    Tokenizer(models.WordLevel(words, unk_token="w2")).save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<end>", "pad_token": {"content": "<pad>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def record(checkpoint, **args):
    """More arguments in a checkpoint."""
    (checkpoint / "args.json").write_text(json.dumps(ARGS | args))


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
    made = convert.megatron_to_hf(tree, checkpoint, tmp_path / "target", tokenizer=hf)
    assert names(tmp_path / "target") == WITH_TOKENIZER
    config = json.loads((tmp_path / "target/config.json").read_text())
    assert shape_of_config(config).vocab_size == 250
    assert (config["torch_dtype"], config["max_position_embeddings"]) == ("bfloat16", 128)
    ids = {"eos_token_id": 0, "pad_token_id": 1}  # the tokenizer's, and not config.json's
    assert config | ids | {"bos_token_id": None} == config
    assert json.loads((tmp_path / "target/generation_config.json").read_text()) == ids
    command, *flags = json.loads((tmp_path / "target/weights").read_text())
    assert (command, flags[-1]) == ("to-hf", "--bf16")
    assert dict(pairwise(flags))["--vocab-size"] == "250"
    assert made.notes == ()


@pytest.mark.slow
def test_the_tokenizer_of_the_training_is_the_default(tree, checkpoint, tmp_path):
    own = write_tokenizer(tmp_path / "own", 200)
    record(checkpoint, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(own))
    made = convert.megatron_to_hf(tree, checkpoint, tmp_path / "target")
    assert names(tmp_path / "target") == WITH_TOKENIZER
    config = json.loads((tmp_path / "target/config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (200, 0)
    assert made.notes == ()
    (own / "tokenizer.json").unlink()
    made = convert.megatron_to_hf(tree, checkpoint, tmp_path / "without")
    assert names(tmp_path / "without") == ["README.md", "config.json", "weights"]
    (note,) = made.notes
    assert str(own) in note and "--tokenizer" in note


@pytest.mark.slow
def test_a_tokenizer_that_is_too_large_is_refused(tree, checkpoint, tmp_path):
    big = write_tokenizer(tmp_path / "big", 257)
    with pytest.raises(ConvertError, match=r"big has 257 .* 256 .*--vocab-size 256"):
        convert.megatron_to_hf(tree, checkpoint, tmp_path / "target", tokenizer=big)
    assert not (tmp_path / "target").exists()
    convert.megatron_to_hf(tree, checkpoint, tmp_path / "target", tokenizer=big, vocab_size=256)
    assert (tmp_path / "target/tokenizer.json").exists()


@pytest.mark.slow
def test_rows_that_are_more_than_padding_are_kept(tree, checkpoint, tmp_path):
    small = write_tokenizer(tmp_path / "small", 100)  # whose padding would end at 128
    made = convert.megatron_to_hf(tree, checkpoint, tmp_path / "target", tokenizer=small)
    config = json.loads((tmp_path / "target/config.json").read_text())
    assert config["vocab_size"] == 256
    assert "--vocab-size" in made.notes[0]
    record(checkpoint, vocab_size=256)  # an imported model's: known, and not only padded
    made = convert.megatron_to_hf(tree, checkpoint, tmp_path / "again", tokenizer=small)
    assert made.notes == ()


def test_the_dtype_of_the_files_may_be_another_than_the_checkpoints(tree, checkpoint, tmp_path):
    convert.megatron_to_hf(tree, checkpoint, tmp_path / "target", dtype="fp16")
    config = json.loads((tmp_path / "target/config.json").read_text())
    assert config["torch_dtype"] == "float16"
    assert json.loads((tmp_path / "target/weights").read_text())[-1] == "--bf16"  # as it is read


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
    assert names(tmp_path / "target") == ["README.md", "config.json", "weights"]


@pytest.mark.slow
def test_without_a_tokenizer_no_id_is_made_up(tree, checkpoint, tmp_path):
    made = convert.megatron_to_hf(tree, checkpoint, tmp_path / "target")
    config = json.loads((tmp_path / "target/config.json").read_text())
    assert (config["eos_token_id"], config["vocab_size"]) == (None, 256)
    assert names(tmp_path / "target") == ["README.md", "config.json", "weights"]
    (note,) = made.notes
    assert "--tokenizer" in note
    assert made.lines() == [str(tmp_path / "target"), f"note: {note}"]


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


@pytest.mark.parametrize(("free", "error"), [(0, DiskFullError), (10**9, RunError)])
def test_a_program_that_had_no_room_left_nothing_and_the_disk_is_named(
    tree, hf, tmp_path, monkeypatch, free, error
):
    (hf / "fail.json").write_text("")
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(convert.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(error) as caught:
        convert.hf_to_megatron(tree, hf, tmp_path / "to" / "target")
    assert (f"{tmp_path}/to " in str(caught.value)) == (free == 0)
    assert names(tmp_path / "to") == []


def test_a_copy_that_had_no_room_names_the_disk(tmp_path):
    with (
        pytest.raises(DiskFullError, match=str(tmp_path)),
        convert.staged(tmp_path / "target"),
        Path("/dev/full").open("w") as file,
    ):
        file.write("weights")
    assert names(tmp_path) == []


def test_a_target_that_is_there_is_left_as_it_is(tree, hf, checkpoint, tmp_path):
    (tmp_path / "target").mkdir()
    exists = rf"{tmp_path}/target already exists\. Expected: a new folder\.$"
    with pytest.raises(ConvertError, match=exists):
        convert.hf_to_megatron(tree, hf, tmp_path / "target")
    with pytest.raises(ConvertError, match=exists):
        convert.megatron_to_hf(tree, checkpoint, tmp_path / "target")
    assert names(tmp_path / "target") == []


@pytest.mark.slow
def test_a_source_that_is_none_is_refused(tree, hf, checkpoint, tmp_path):
    target = tmp_path / "target"
    with pytest.raises(ConvertError, match=r"config\.json"):
        convert.hf_to_megatron(tree, checkpoint, target)
    with pytest.raises(ConvertError, match=f"`mqo convert hf-to-megatron {hf} CHECKPOINT`"):
        convert.megatron_to_hf(tree, hf, target)
    (checkpoint / convert.TRACKER).rename(tmp_path / "tracker")
    (checkpoint / "iter_0000010").mkdir()
    (checkpoint / "iter_0000010/metadata.json").write_text("{}")
    with pytest.raises(ConvertError, match=f"{convert.TRACKER} in {checkpoint} .*`echo 10 > "):
        convert.megatron_to_hf(tree, checkpoint, target)
    (tmp_path / "tracker").rename(checkpoint / convert.TRACKER)
    with pytest.raises(ConvertError, match=r"/absent .*tokenizer\.json"):
        convert.megatron_to_hf(tree, checkpoint, target, tokenizer=tmp_path / "absent")
    with pytest.raises(ConvertError, match=rf"{tree} .*tokenizer\.json"):
        convert.megatron_to_hf(tree, checkpoint, target, tokenizer=tree)
    (hf / "config.json").write_text("{")
    with pytest.raises(ConvertError, match=r"config\.json cannot be read"):
        convert.hf_to_megatron(tree, hf, target)


def test_without_modelopt_the_command_to_install_it_is_told(tree, hf, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", modelopt_is(None))
    with pytest.raises(SetupError, match=r"pip install .*modelopt"):
        convert.hf_to_megatron(tree, hf, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_a_dtype_that_there_is_not_is_refused(tree, checkpoint, tmp_path, command_line):
    words = ["convert", "megatron-to-hf", checkpoint, tmp_path / "target", "--dtype", "fp8"]
    code, _, err = command_line(*words, "--tree", tree)
    assert code == 2
    assert "bf16, fp16, fp32" in err
    assert not (tmp_path / "target").exists()


def test_the_command_prints_the_target_and_the_flags(tree, hf, tmp_path, command_line):
    words = ["convert", "hf-to-megatron", hf, tmp_path / "target", "--tree", tree]
    code, out, _ = command_line(*words)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == str(tmp_path / "target")
    assert lines[1].startswith("model flags: --num-layers 16")


def test_each_stage_of_the_program_has_a_line(tree, hf, tmp_path):
    """The program waits with each stage until its line was printed."""
    waits = """
def to_megatron(source: Path, target: Path, flags: list[str]):
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
