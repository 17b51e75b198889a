"""A run's configuration: its parts, and how it is written and read again."""

import json

import pytest
from mqo.errors import MqoError, RunError
from mqo.launch.config import Cluster, Quantization, Recording, RunConfig, resolve
from mqo.project import Project
from mqo.recipes import recipe as recipes
from mqo.runs import RunFolder, checkpoints_of


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path)


def made(**rest):
    flags = ("--train-samples", "40")
    return resolve("llama32-1b", "wikipedia", "FA_linear_mxfp8", "tiny", extra_flags=flags, **rest)


def test_what_is_written_is_read_again(run):
    config = made(
        block=16,
        exclude=("output_layer",),
        schedule=("qk: mxfp8",),
        dump=(1, 3),
        check_nan=True,
        keep_checkpoints=2,
        checkpoint=run.root / "saved",
        without=("quant_sites",),
        cluster=Cluster(nproc_per_node=2),
    )
    config.write(run)
    assert RunConfig.read(run) == config
    assert checkpoints_of(run.root) == run.root / "saved"
    parts = json.loads(run.config.read_text())
    assert list(parts) == ["experiment", "quantization", "placement", "recording"]
    assert config.quantization.options == {"block": 16, "exclude": ["output_layer"]}
    recorded = {"dump": [1, 3], "keep_checkpoints": 2, "check_nan": True}
    assert config.recording == Recording(options=recorded)


def test_a_run_of_version_0_1_is_refused(run):
    """Its configuration had no parts."""
    run.config.write_text(json.dumps({"model": {"name": "llama32-1b"}, "mode": "bf16"}))
    for read in (RunConfig.read, lambda run: checkpoints_of(run.root)):
        with pytest.raises(RunError, match=r"version 0\.1"):
            read(run)


def test_a_field_that_no_part_has_is_a_mistake_of_the_caller():
    with pytest.raises(TypeError, match="color"):
        made(color="red")


def test_an_option_of_a_patch_that_is_left_out_is_refused():
    options = {"unnormalized_probs": True, "without": ("fused_attention",)}
    with pytest.raises(MqoError, match=r"--unnormalized-probs .*fused_attention.*--without"):
        resolve("llama32-1b", "wikipedia", "pv_mxfp8", "tiny", **options)


def test_keeping_checkpoints_needs_a_run_that_saves(tmp_path):
    with pytest.raises(MqoError, match=r"--keep-last .*CHECKPOINT"):
        made(keep_checkpoints=2)
    assert made(keep_checkpoints=2, checkpoint=tmp_path).recording.options["keep_checkpoints"] == 2


def test_an_option_may_be_for_a_later_type():
    for site in ("qk", "attention"):
        schedule = (f"{site}: none until 3, then mxfp8",)
        resolve("llama32-1b", "wikipedia", "FA_mxfp8", "tiny", smooth_key=True, schedule=schedule)


def test_what_nobody_chose_is_not_kept():
    assert made(exclude=(), dump=()).quantization == made().quantization
    assert made().recording == Recording()
    assert Quantization(mode="bf16", types=None).options == {}
    assert resolve("llama32-1b", "wikipedia", "bf16", "standard").recording.options == {
        "keep_checkpoints": 3
    }


VERSION_02 = json.loads(
    (Project.here().root / "tests/vectors/configurations-0.2.0.json").read_text()
)


@pytest.mark.parametrize("row", VERSION_02, ids=lambda row: row["cell"]["quantization"]["mode"])
def test_runs_of_version_02_have_the_settings_of_the_same_command_today(row, run):
    run.config.write_text(json.dumps(row["cell"]))
    named = dict(row["resolve"])
    if "recipe" in named:
        named["recipe"] = recipes.read(named["recipe"])
    positions = [named.pop(name) for name in ("model", "dataset", "mode", "training")]
    today = resolve(*positions, extra_flags=("--seed", "2"), **named)
    assert RunConfig.read(run).settings() == today.settings()


def test_words_of_a_recipe_are_no_settings_and_its_rules_are():
    recipe = recipes.read("nvfp4")
    named = ("llama32-1b", "wikipedia", "bf16", "tiny")
    settings, reworded, other = (
        resolve(*named, recipe=recipe.model_copy(update=update)).settings()
        for update in ({}, {"summary": "new", "published": "new"}, {"rules": ()})
    )
    assert settings == reworded != other
