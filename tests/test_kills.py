"""Trainings that are killed and started again; tests/kill_trainings.py kills more of them."""

import os
import random
import subprocess

import pytest
from mqo.launch.checkpoints import saved, tracked
from mqo.megatron.run.files import iteration_folder

pytest.importorskip("torch")
from .kill_trainings import LAST, MODES, Kill, Training, try_kills
from .vendored_tree import PROJECT

BATCH = PROJECT.root / "script/slurm.sbatch"
STOCHASTIC = next(iter(MODES))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function that returns the undisturbed training of a mode."""
    made = {}

    def get(mode):
        if mode not in made:
            made[mode] = Training(tmp_path_factory.mktemp("whole"), mode)
            code, said = made[mode].start()
            assert code == 0, said
            assert saved(made[mode].saved) == ["4", "6", "8"]
        return made[mode]

    return get


@pytest.mark.slow
def test_a_training_killed_in_its_last_save_and_before_its_end_ends_the_same(whole, tmp_path):
    """Though the newest checkpoint is damaged after the first kill, and another one half-saved."""
    kills = [Kill("save", LAST, 0, False), Kill("end", LAST, 0, True)]
    said, stray = [], f"iter_{LAST:07d}/__7_7.distcp"

    def after(training):
        said.append(training.folders()[-1].log.read_text())
        if len(said) == 1:
            newest = iteration_folder(training.saved, tracked(training.saved))
            damaged = next(newest.glob("*.distcp"))
            damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
            (training.saved / stray).write_bytes(b"half")

    killed = tmp_path / "killed"
    done, found = try_kills(killed, STOCHASTIC, whole(STOCHASTIC), kills, after)
    assert done == kills
    assert found == []
    assert ["is damaged" in text for text in said] == [False, True]
    assert not (killed / "checkpoints" / stray).exists()


@pytest.mark.slow
def test_a_job_that_slurm_queues_again_after_its_end_exits_with_0(whole, tmp_path):
    training = whole(STOCHASTIC)
    srun = tmp_path / "srun"
    srun.write_text('while [[ $1 == -* ]]; do shift; done; SLURM_NODEID=0 exec "$@"')
    (tmp_path / "scontrol").write_text('[[ $1 == show ]] && echo "$HOSTNAME" || exit 9')
    for program in (srun, tmp_path / "scontrol"):
        program.write_text(f"#!/usr/bin/env bash\n{program.read_text()}\n")
        program.chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "SLURM_JOB_NODELIST": "this"}
    job |= {"SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "1"}
    env = os.environ | job | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", BATCH, *training.command[1:]]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "already trained" in done.stdout
    assert len(training.folders()) == 1


@pytest.mark.heavy
@pytest.mark.parametrize("mode", MODES)
def test_a_training_killed_at_random_ends_the_same(whole, tmp_path, mode):
    rng = random.Random(mode)
    kills = [Kill.draw(rng, 20) for _ in range(3)]
    assert try_kills(tmp_path / "killed", mode, whole(mode), kills)[1] == []
