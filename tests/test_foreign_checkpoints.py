"""Checkpoints with commands or foreign arguments, given to each program that reads one."""

import hashlib
import io
import json
import os
import pickle
import shutil
from dataclasses import replace

import pytest
import torch
from mqo.launch.config import resolve
from mqo.project import Project
from torch.distributed.checkpoint import FileSystemReader

from . import real_runs
from .real_runs import TINY, launched

pytestmark = pytest.mark.slow

PROJECT = Project.here()
TRAIN = [PROJECT.root / "script/train_config.py", "--model", "llama32-1b"]
TRAIN += ["--dataset", "wikipedia", "--quantization", "bf16", "--training-config", "tiny"]
PTQ = PROJECT.tree / "examples/export/ptq_and_trtllm_export/text_generation_ptq.py"
MQO = ["-m", "mqo"]
PROGRAMS = {
    "resume": lambda folder, out: [*TRAIN, "--runs", out, folder, "--", *TINY],
    "teacher": lambda folder, out: [*TRAIN, "--runs", out, "--teacher", folder, "--", *TINY],
    "eval": lambda folder, out: [*MQO, "eval", folder],
    "generate": lambda folder, out: [*MQO, "generate", folder, "--prompt", "The", "--tokens", "2"],
    "convert": lambda folder, out: [*MQO, "convert", "megatron-to-hf", folder, out],
    "export": lambda folder, out: [
        *(PTQ, "--load", folder, "--save", out, "--export-quant-cfg", "fp8"),
        *("--calib-size", "4", "--calib-length", "32"),
    ],
}


class Command:
    """Pickles as a call of os.system that makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


@pytest.fixture(scope="module")
def checkpoints(checkout_with, tmp_path_factory):
    """What a run saved."""
    folder = tmp_path_factory.mktemp("trained") / "checkpoints"
    flags = (*TINY, "--micro-batch-size", "4")
    cell = resolve("llama32-1b", "wikipedia", "bf16", "tiny", checkpoint=folder, extra_flags=flags)
    real_runs.run(checkout_with(runs=tmp_path_factory.mktemp("runs")), cell)
    return folder


def in_metadata(iteration, command):
    (iteration / ".metadata").write_bytes(pickle.dumps(command))


def in_an_entry(iteration, command):
    """In the entry of a shard that holds the training's arguments."""
    metadata, file = FileSystemReader(iteration).read_metadata(), io.BytesIO()
    torch.save(command, file)
    (key,) = [key for key in metadata.storage_data if key.fqn.startswith("common_state")]
    place = metadata.storage_data[key]
    shard = iteration / place.relative_path
    place = replace(place, offset=shard.stat().st_size, length=len(file.getvalue()))
    metadata.storage_data[key] = place
    with shard.open("ab") as end:
        end.write(file.getvalue())
    (iteration / ".metadata").write_bytes(pickle.dumps(metadata))


def in_common(iteration, command):
    torch.save({"args": command}, iteration / "common.pt")


def seal(iteration):
    """Make the hashes right, as whoever wrote the checkpoint would."""
    path = iteration / "integrity.json"
    table = json.loads(path.read_text())
    for name in table["files"]:
        table["files"][name] = hashlib.sha256((iteration / name).read_bytes()).hexdigest()
    path.write_text(json.dumps(table))


CASES = [
    pytest.param(program, hide, marks=[] if always else pytest.mark.heavy)
    for program in PROGRAMS
    for hide, always in (
        (in_metadata, False),
        (in_an_entry, program in ("resume", "eval", "export")),
        (in_common, False),
    )
]


@pytest.mark.parametrize(("program", "hide"), CASES)
def test_a_program_refuses_the_command_and_ends_in_one_paragraph(
    program, hide, checkpoints, tmp_path
):
    folder, marker = tmp_path / "checkpoints", tmp_path / "ran"
    shutil.copytree(checkpoints, folder)
    (iteration,) = folder.glob("iter_*")
    hide(iteration, Command(marker))
    seal(iteration)
    done = launched(*PROGRAMS[program](folder, tmp_path / "out"), folder=tmp_path)
    assert done.returncode != 0
    assert not marker.exists()
    assert "posix.system" in done.stderr
    assert "Traceback" not in done.stderr


# -- arguments -------------------------------------------------------------------------------------


def with_arguments(checkpoints, folder, **change):
    """A copy of the checkpoints, whose arguments are changed."""
    from megatron.inference.checkpointing import common_state

    shutil.copytree(checkpoints, folder)
    (iteration,) = folder.glob("iter_*")
    state = common_state(iteration)
    torch.distributed.destroy_process_group()  # which common_state made
    vars(state["args"]).update(change)
    torch.save(state, iteration / "common.pt")
    seal(iteration)
    return folder


def listing(folder):
    return sorted(path for path in folder.rglob("*"))


WORST = {
    "another kind": {"hidden_size": "64"},
    "no size": {"num_layers": None},
    "beyond memory": {"hidden_size": 2**18, "ffn_hidden_size": 2**22, "num_layers": 2**14},
    "beyond its range": {"padded_vocab_size": 2**50},
    "text for layers": {"no_rope_freq": "os.system('touch ran')"},
    "layers of a list": {"spec": [1]},
    "a device": {"tokenizer_model": "/dev/zero"},
    "another model": {"of_another_release": 1},
    "not a number": {"layernorm_epsilon": float("nan")},
    "a table": {"num_attention_heads": {"a": {"b": 1}}},
}
# One in each program in every run of the slow tests.
ALWAYS = {"eval": "beyond memory", "generate": "another kind", "convert": "another model"}


@pytest.mark.parametrize(
    ("program", "what"),
    [
        pytest.param(program, what, marks=[] if ALWAYS[program] == what else pytest.mark.heavy)
        for program in ALWAYS
        for what in WORST
    ],
)
def test_a_program_refuses_arguments_in_one_paragraph(program, what, checkpoints, tmp_path):
    folder = with_arguments(checkpoints, tmp_path / "checkpoints", **WORST[what])
    before = listing(tmp_path)
    done = launched(*PROGRAMS[program](folder, tmp_path / "out"), folder=tmp_path)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("mqo: ")]
    assert said == done.stderr.splitlines()[-1]
    assert next(iter(WORST[what])) in said or "GiB" in said
    assert listing(tmp_path) == before


def test_an_evaluation_writes_nowhere_that_the_checkpoint_says(checkpoints, tmp_path):
    places = ("config_logger_dir", "tensorboard_dir", "save", "data_cache_path")
    change = {name: str(tmp_path / name) for name in places}
    change |= {"data_args_path": "/dev/zero", "fp8_quantizer_factory": "os.system"}
    change |= {"wandb_project": "foreign", "enable_msc": True, "of_another_release": 1}
    foreign = with_arguments(checkpoints, tmp_path / "foreign", **change)
    before, made = listing(tmp_path), []
    for folder in (checkpoints, foreign):
        words = ["eval", folder, "--tokens", "64", "--json"]
        words += ["--ignore-argument", "of_another_release"]
        done = launched(*MQO, *words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        made.append(json.loads(done.stdout)["losses"][0]["loss"])
    assert made[0] == made[1]
    assert listing(tmp_path) == before
