"""`mqo simulate`, as a user types it."""

import json
from argparse import Namespace
from contextlib import nullcontext

import pytest
from mqo.cli import app
from mqo.display import WIDTH
from mqo.errors import DataError, LayoutError, MqoError, RunError, UnknownNameError
from mqo.project import Project
from mqo.quant.plugins import PLUGINS
from mqo.simulate.command import check_release
from typer.testing import CliRunner

SCRIPTS = Project.here().root / "script"
SCRIPT = SCRIPTS / "llama32-1b/pretrain_llama32-1b_wikipedia_FA_linear_mxfp8.sh"
TINY = ("--training-config", "tiny", "--device", "h100-80gb")
FEEDS = ("--", "--global-batch-size", "64", "--tensor-model-parallel-size", "2")


def call(*words, script=SCRIPT):
    done = CliRunner().invoke(app, ["simulate", str(script), *words])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_one_screen_says_whether_it_fits_and_what_bounds_it(vendored):
    done = call(*TINY, *FEEDS)
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert len(lines) <= 45
    assert "Does it fit? Yes" in done.stdout
    assert "What bounds the step?" in done.stdout


def test_json_has_all_of_it(vendored):
    found = json.loads(call(*TINY, "--json", *FEEDS).stdout)
    assert (found["model"], found["gpus"], found["fits"]) == ("llama32-1b", 8, True)
    (rank,) = found["ranks"]
    assert (rank["world"], rank["data"], rank["micro_batches"]) == (8, 4, 4)
    assert sum(rank["kinds"].values()) == rank["peak"]
    assert found["need"] >= rank["peak"] + found["reserve"]
    types = {row["quant_type"] for row in rank["works"] if row["gemm"] == "fprop"}
    assert types == {"mxfp8"}
    groups = {row["group"] for row in rank["exchanges"]}
    assert {"TENSOR_MODEL_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_WITH_CP"} <= groups


def test_what_does_not_fit_exits_with_1(vendored, monkeypatch):
    monkeypatch.setattr("mqo.simulate.result.usable", lambda memory: 1 << 20)
    done = call(*TINY, *FEEDS)
    assert done.exit_code == 1
    assert "Does it fit? No" in done.stdout


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--device", "h9000"), UnknownNameError),
        ((*TINY, "--", "--global-batch-size", "7"), LayoutError),
        ((*TINY, "--nnodes", "2"), MqoError),
        ((*TINY, "-o", "no such folder/page.html"), MqoError),
        ((*TINY, "--native", *FEEDS), MqoError),  # in fp32
        ((*TINY, "--native", "-o", "page.html"), MqoError),
        ((*TINY, "--no-such-option"), MqoError),
        ((*TINY, "--distillation-config", "distill.yaml"), DataError),
        ((*TINY, "--", "--dataloader-inter-document-masking"), MqoError),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(words, error):
    with pytest.raises(error):
        call(*words)


def test_native_estimates_the_script_with_its_formats(vendored):
    words = ("--training-config", "fast", "--device", "b200", "--native")
    feeds = (*FEEDS, "--num-layers", "2")
    found = json.loads(call(*words, "--json", *feeds).stdout)
    assert (found["mode"], found["formats"]) == ("FA_linear_mxfp8", ["mxfp8"])
    assert found["estimated"] and found["fits"]
    assert found["seconds"]["native"]["others"] > found["seconds"]["unquantized"]["others"]
    assert found["memory"]["native"] == found["memory"]["unquantized"]
    lines = call(*words, *feeds).stdout.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert any(line.startswith("estimated speed-up: ") for line in lines)


def test_native_names_the_format_that_a_device_lacks():
    with pytest.raises(MqoError) as caught:
        call("--training-config", "fast", "--device", "h100-80gb", "--native", *FEEDS)
    assert caught.value.found == "h100-80gb has no GEMMs in mxfp8"


@pytest.mark.parametrize(
    ("words", "sites"),
    [
        (("--quantization", "FA_mxfp8", "--attention-gemms", "all"), "qk_recompute, dq, dk"),
        (("--quantization", "bf16", "--recipe", "sagebwd"), "qk_recompute, dv, dp, dq, dk"),
    ],
    ids=["mode", "recipe"],
)
def test_native_refuses_the_products_of_attentions_backward_pass_by_name(words, sites):
    with pytest.raises(MqoError) as caught:
        call("--training-config", "fast", "--device", "b200", "--native", *words, *FEEDS)
    assert caught.value.found.endswith(f"attention's backward pass: {sites}")


@pytest.mark.slow
def test_a_teacher_is_a_folder_that_says_what_it_is(vendored, tmp_path):
    with pytest.raises(MqoError, match=r"model_config.yaml") as caught:
        call(*TINY, "--teacher", str(tmp_path), *FEEDS)
    assert "\n" not in str(caught.value)
    (tmp_path / "model_config.yaml").write_text(
        "{num_layers: 2, hidden_size: 64, ffn_hidden_size: 64, num_attention_heads: 2}"
    )
    done = call(*TINY, "--teacher", str(tmp_path), *FEEDS)
    assert done.exit_code == 0
    assert "with the teacher in" in done.stdout


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--no-such-flag", "1"), "--no-such-flag"),
        (("--transformer-impl", "transformer_engine"), "Transformer Engine"),
        (("--num-layers", "3", "--pipeline-model-parallel-size", "2"), "pipeline"),
    ],
)
def test_what_upstream_refuses_is_one_paragraph(vendored, flags, named):
    with pytest.raises(RunError, match=named) as error:
        call(*TINY, *FEEDS, *flags)
    assert "Traceback" not in str(error.value) + error.value.detail


def test_a_front_end_takes_the_options_itself(vendored):
    words = ("--model", "llama32-1b", "--dataset", "dolma", "--quantization", "FA_linear_mxfp8")
    done = call(*words, *TINY, *FEEDS, script=SCRIPTS / "train_config.py")
    assert done.exit_code == 0
    assert "llama32-1b, FA_linear_mxfp8, tiny" in done.stdout


@pytest.mark.parametrize(
    ("version", "refused"), [("0.18.2", True), ("0.19.0rc1", False), ("1.0.0", False)]
)
def test_a_checkout_of_an_older_release_is_refused(version, refused):
    tree = Namespace(is_checkout=True, root="tree", upstream=lambda: Namespace(version=version))
    with pytest.raises(MqoError, match=version) if refused else nullcontext():
        check_release(tree)


def test_a_quantizer_of_the_user_is_refused_before_anything_runs(tmp_path, monkeypatch):
    """Its file is not run, either."""
    path = tmp_path / "mine.py"
    path.write_text('raise SystemExit\n@quantizer("mine")\ndef mine(x, context): ...\n')
    monkeypatch.setattr("mqo.simulate.command.plan_layout", lambda *args: pytest.fail("planned"))
    words = ("--model", "llama32-1b", "--dataset", "dolma", "--quantization", "FA_mine")
    try:
        with pytest.raises(MqoError, match="mine is a quantizer in Python"):
            call(*words, *TINY, "--plugin", str(path), *FEEDS, script=SCRIPTS / "train_config.py")
    finally:
        PLUGINS.clear()
