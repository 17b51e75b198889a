"""Which commands have nothing left to do, by the state of their CHECKPOINT."""

import hashlib
import json

import pytest
from mqo.commands import train_config
from mqo.errors import RunError
from mqo.launch.config import Cluster, resolve
from mqo.launch.finished import FILE, MANIFEST, finished, note_finished, started_from
from mqo.launch.folder import create
from mqo.megatron.run.files import TRACKER
from mqo.recipes import recipe as recipes

STEPS = 8  # of `tiny`
MODES = {
    "bf16": {},
    "linear_mxfp8": {},
    "mxfp8, all GEMMs": {"gemms": "all"},
    "FA_mxfp4": {"schedule": ("qk: mxfp4 until 0.5, then mxfp8",)},
    "hifp8": {"rounding": "stochastic"},
}


def config(checkpoint, mode="linear_mxfp8", *flags, **rest):
    name = mode.partition(",")[0]
    settings = MODES.get(mode, {}) | rest
    names = ("llama32-1b", "wikipedia", name, "tiny")
    return resolve(*names, checkpoint=checkpoint, extra_flags=flags, **settings)


def save(folder, step, content="weights"):
    """A checkpoint as a run leaves it, of one file."""
    place = folder / f"iter_{step:07d}"
    place.mkdir(parents=True)
    (place / "metadata.json").write_text("{}")
    (place / "__0_0.distcp").write_text(content)
    digest = hashlib.sha256(content.encode()).hexdigest()
    (place / MANIFEST).write_text(json.dumps({"files": {"__0_0.distcp": digest}}))
    (folder / TRACKER).write_text(str(step))
    return place


@pytest.fixture
def saved(tmp_path):
    return tmp_path / "checkpoints"


def end(saved, made, *, steps=STEPS):
    """The end of a run of `made`, that trained `steps` in its process."""
    run = create(saved.parent / "runs", made.title)
    run.ended.write_text(json.dumps({"steps": steps}))
    note_finished(run, made, ["python", "--save", str(saved)])
    return run


@pytest.mark.parametrize("mode", MODES)
def test_the_command_of_a_finished_training_has_nothing_left_to_do(saved, mode):
    place = save(saved, STEPS)
    run = end(saved, config(saved, mode))
    done = finished(config(saved, mode))
    assert (done.step, done.steps, done.checkpoint, done.run) == (STEPS, STEPS, place, run.root)
    assert f"already trained: step {STEPS} of {STEPS}" in done.line()
    assert str(place) in done.line()


def test_a_recipe_is_finished_too(saved):
    save(saved, STEPS)
    made = config(saved, "bf16", recipe=recipes.read("nvfp4"))
    end(saved, made)
    assert finished(made) is not None


def test_the_command_says_so_and_makes_no_run_folder(saved, tmp_path, capsys):
    save(saved, STEPS)
    end(saved, config(saved))
    words = ["--model", "llama32-1b", "--dataset", "wikipedia", "--quantization", "linear_mxfp8"]
    words += ["--training-config", "tiny", "--runs", str(tmp_path / "others")]
    train_config.train_with([str(saved), *words], front_end=False)
    assert capsys.readouterr().out.startswith("finished : already trained: step 8 of 8")
    assert not (tmp_path / "others").exists()


def nothing(saved):
    return []


def shorter(saved):
    save(saved, STEPS - 4)


def released(saved):
    save(saved, STEPS)
    (saved / TRACKER).write_text("release")


def without_a_record(saved):
    save(saved, STEPS)


def left_early(saved):
    save(saved, STEPS)
    run = create(saved.parent / "runs", "early")
    note_finished(run, config(saved), ["python", "--save", str(saved)])


def damaged(saved):
    place = save(saved, STEPS)
    end(saved, config(saved))
    (place / "__0_0.distcp").write_text("weightS")


def incomplete(saved):
    place = save(saved, STEPS)
    end(saved, config(saved))
    (place / "__0_0.distcp").unlink()


def without_hashes(saved):
    place = save(saved, STEPS)
    end(saved, config(saved))
    (place / MANIFEST).unlink()


def saved_again(saved):
    """As after the folder was emptied, but for the record."""
    place = save(saved, STEPS)
    end(saved, config(saved))
    for file in place.iterdir():
        file.unlink()
    place.rmdir()
    save(saved, STEPS, "other weights")


def longer_and_damaged(saved):
    place = save(saved, 2 * STEPS)
    (place / "__0_0.distcp").write_text("weightS")


def damaged_record(saved):
    save(saved, STEPS)
    (saved / FILE).write_text("{")


LEFT = [
    *(nothing, shorter, released, without_a_record, left_early, damaged, incomplete),
    *(without_hashes, saved_again, longer_and_damaged, damaged_record),
]


@pytest.mark.parametrize("state", LEFT)
def test_a_training_with_something_left_is_started(saved, state):
    state(saved)
    assert finished(config(saved)) is None


def test_without_a_checkpoint_folder_a_run_is_started():
    assert finished(config(None)) is None


def test_a_longer_checkpoint_has_passed_the_command(saved):
    save(saved, 2 * STEPS)
    done = finished(config(saved))
    assert (done.step, done.steps, done.run) == (2 * STEPS, STEPS, None)


@pytest.mark.parametrize("flags", [("--train-samples", "48"), ("--train-iters", "12")])
def test_a_longer_training_goes_on(saved, flags):
    save(saved, STEPS)
    end(saved, config(saved))
    assert finished(config(saved, "linear_mxfp8", *flags)) is None


@pytest.mark.parametrize("flags", [("--finetune",), ("--skip-train",), ("--ckpt-step", "4")])
def test_a_run_that_does_not_continue_at_the_last_step_is_started(saved, flags):
    save(saved, STEPS)
    end(saved, config(saved))
    assert finished(config(saved, "linear_mxfp8", *flags)) is None


def test_megatrons_own_load_counts(saved, tmp_path):
    save(saved, STEPS)
    end(saved, config(saved))
    for given in (None, tmp_path / "empty"):
        made = config(given, "linear_mxfp8", "--load", str(saved))
        assert started_from(made.experiment) == (saved, STEPS)
        assert finished(made) is not None


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"mode": "bf16"}, "mode was linear_mxfp8 and is bf16"),
        ({"gemms": "all"}, "gemms was fprop and is all"),
        ({"rounding": "stochastic"}, "options"),
        ({"schedule": ("linear: mxfp8 until 4, then none",)}, "schedule"),
        ({"dtype": "bf16"}, "dtype was fp32 and is bf16"),
        ({"shrink": (4, 8)}, "sizes"),
    ],
)
def test_a_finished_training_of_other_settings_is_not_this_commands(saved, changes, name):
    save(saved, STEPS)
    end(saved, config(saved))
    with pytest.raises(RunError, match=f"^{saved} .*{name}"):
        finished(config(saved, **changes))


def test_a_record_of_a_release_that_knew_fewer_sizes_counts(saved):
    save(saved, STEPS)
    end(saved, config(saved))
    record = json.loads((saved / FILE).read_text())
    for name in ("pattern", "mamba"):
        assert record["settings"]["sizes"].pop(name) is None
    (saved / FILE).write_text(json.dumps(record))
    assert finished(config(saved)) is not None
    with pytest.raises(RunError, match="sizes"):
        finished(config(saved, model_class="hybrid"))


def test_of_several_nodes_the_last_one_writes_the_record(saved):
    save(saved, STEPS)
    first, last = (config(saved, cluster=Cluster(nnodes=2, node_rank=rank)) for rank in (0, 1))
    end(saved, first)
    assert not (saved / FILE).exists()
    end(saved, last)
    assert finished(first) is not None
    assert finished(last) is not None


def test_a_folder_that_takes_no_record_is_no_failure(saved):
    save(saved, STEPS)
    (saved / FILE).mkdir()
    end(saved, config(saved))
    assert finished(config(saved)) is None


def test_a_run_that_saves_nothing_leaves_no_record(saved, tmp_path):
    run = create(tmp_path / "runs", "unsaved")
    run.ended.write_text('{"steps": 8}')
    note_finished(run, config(None), ["python"])
    note_finished(run, config(saved), ["python", "--save", str(saved)])
    assert not saved.exists()
