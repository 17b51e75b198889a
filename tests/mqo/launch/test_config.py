"""A run's configuration: its parts, and how it is written and read again, of earlier runs, too."""

import json
from pathlib import Path

import pytest
from mqo.errors import MqoError
from mqo.launch.config import Cluster, Quantization, Recording, RunConfig, resolve
from mqo.runs import RunFolder, checkpoints_of

# What a run of the launcher wrote before its configuration had parts.
FLAT = json.loads((Path(__file__).parent / "cell_of_2026-11-22.json").read_text())


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


def test_a_run_of_an_earlier_version_is_read(run):
    run.config.write_text(json.dumps(FLAT))
    assert RunConfig.read(run) == made()
    assert checkpoints_of(run.root) == run.checkpoints


def test_the_options_of_an_earlier_run_are_kept(run, tmp_path):
    chosen = FLAT["quantiser"] | {"block": 16, "seed": 0, "tensor_scale": True}
    changes = {"quantiser": chosen, "exclude": ["output_layer"], "record_every": 0, "dump": [2]}
    changes |= {"keep_checkpoints": 3, "check_nan": True, "schedule": ["qk: mxfp8"]}
    changes |= {"checkpoint": str(tmp_path / "saved"), "without": ["quant_sites"]}
    run.config.write_text(json.dumps(FLAT | changes))
    assert RunConfig.read(run) == made(
        block=16,
        seed=0,
        tensor_scale=True,
        exclude=("output_layer",),
        every=0,
        dump=(2,),
        keep_checkpoints=3,
        check_nan=True,
        schedule=("qk: mxfp8",),
        checkpoint=tmp_path / "saved",
        without=("quant_sites",),
    )
    assert checkpoints_of(run.root) == tmp_path / "saved"


def test_every_field_of_the_earlier_form_has_its_place(run):
    """A field that was lost would not differ from its default: each one is changed here."""
    lost = []
    for name in FLAT:
        if name in ("quantiser", "exclude", "record_every", "dump", "keep_checkpoints"):
            continue  # options, of which the test above tells
        run.config.write_text(json.dumps(FLAT | {name: "another"}))
        if "another" not in [v for part in run.read_config().values() for v in part.values()]:
            lost.append(name)
    assert lost == ["check_nan"]  # an option, too


def test_a_field_that_no_part_has_is_a_mistake_of_the_caller():
    with pytest.raises(TypeError, match="color"):
        made(color="red")


def test_an_option_of_a_patch_that_is_left_out_is_refused():
    options = {"unnormalized_probs": True, "without": ("fused_attention",)}
    with pytest.raises(MqoError, match="--without fused_attention"):
        resolve("llama32-1b", "wikipedia", "pv_mxfp8", "tiny", **options)


def test_keeping_checkpoints_needs_a_run_that_saves(tmp_path):
    with pytest.raises(MqoError, match="--keep-last changes nothing"):
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
