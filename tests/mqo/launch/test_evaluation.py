"""`mqo eval` and `mqo generate` around their programs: ones of our own stand in for them."""

import json
import math
from dataclasses import replace

import pytest
from mqo.errors import CheckpointError, DataError
from mqo.launch import evaluation
from mqo.launch.evaluation import Loss, loss_lines
from mqo.launch.forward_pass import AS_TRAINED, SavedModel, recipe_rows

# Says what it was told: each word as it came, and the quant.toml.
EVALUATE = """
import json, os, sys, tomllib
from pathlib import Path

def describe(checkpoint: Path):
    facts = json.loads((checkpoint / "types.json").read_text())
    record = {"folder": str(checkpoint), "types": facts, "rows": (checkpoint / "rows").exists()}
    return record | {"formats": {}, "plugins": {}}

def run(checkpoint: Path, **words):
    if (checkpoint / "fail.json").exists():
        Path(os.environ["MQO_FAILURE"]).write_text((checkpoint / "fail.json").read_text())
        sys.exit(1)
    options = tomllib.loads(Path(os.environ["MQO_QUANT_CONFIG"]).read_text())
    (checkpoint / "told.json").write_text(json.dumps([words, options]))
    facts = {"loss": 2.0 + len(options["asked"]["qk"]), "tokens": 10, "window": 4}
    return facts | {"text": ["a text"], "iteration": 3, "dtype": "float32", "seconds": 1.0}
"""


@pytest.fixture
def run(tmp_path):
    """A run with options of its own, which saved a checkpoint."""
    root = tmp_path / "runs/one"
    (root / "checkpoints").mkdir(parents=True)
    (root / "cell.json").write_text('{"experiment": {"checkpoint": null}}')
    (root / "checkpoints/latest_checkpointed_iteration.txt").write_text("3")
    (root / "checkpoints/types.json").write_text(
        '{"fprop": "mxfp8", "dgrad": "mxfp8", "wgrad": "mxfp8", "qk": "mxfp8", "pv": "none"}'
    )
    text = '[asked]\nfprop = "mxfp8"\n[quantizer]\nblock = 16\nsave_activations = "packed"\n'
    (root / "quant.toml").write_text(
        f'{text}[layers]\nexclude = ["output_layer"]\ninclude = ["o*"]\n'
    )
    return root


@pytest.fixture
def taken():
    """The types of each snapshot."""
    return []


@pytest.fixture
def tree(patched, taken, monkeypatch):
    """The tree in miniature, with the program; its few sites take any type."""
    (patched.tree.root / "tools").mkdir()
    (patched.tree.root / evaluation.EVALUATE).write_text(EVALUATE)

    def snapshot(tree, target, *, types):
        taken.append(types)
        (target / "tools").mkdir(parents=True)
        (target / evaluation.EVALUATE).write_text(EVALUATE)

    monkeypatch.setattr(evaluation, "snapshot", snapshot)
    return patched.tree


def told(run):
    return json.loads((run / "checkpoints/told.json").read_text())


def test_each_mode_has_its_types_and_the_runs_own_options(tree, taken, run):
    found = evaluation.evaluate(
        tree, [SavedModel.find(run)], ["bf16", "mxfp4"], evaluation.text(tokens=5)
    )
    assert [one.mode for one in found] == ["bf16", "mxfp4"]
    assert taken == [dict.fromkeys(("fprop", "qk", "pv"), kind) for kind in ("none", "mxfp4")]
    words, options = told(run)
    assert words["choice"] == {"data": [], "tokens": 5, "tokenizer": None}
    assert "--transformer-impl" in words["platform"]
    assert options["asked"] == {"fprop": "mxfp4", "qk": "mxfp4", "pv": "mxfp4"}
    assert options["quantizer"] == {"block": 16, "cache_weights": True}
    assert options["layers"] == {"exclude": ["output_layer"], "include": ["o*"]}
    assert options["record"] == {"every": 0}


def test_by_default_the_mode_is_the_one_of_the_checkpoint(tree, run):
    place = SavedModel.find(run / "checkpoints")
    (own,) = evaluation.evaluate(tree, [place], [AS_TRAINED], evaluation.text())
    assert (own.mode, own.checkpoint) == ("FA_linear_mxfp8", "one")
    assert own.types == {"fprop": "mxfp8", "qk": "mxfp8", "pv": "none"}
    for types, mode in (({}, "bf16"), ({"pv": "mxfp4", "qk": "mxfp8"}, AS_TRAINED)):
        (run / "checkpoints/types.json").write_text(json.dumps(types))
        assert evaluation.evaluate(tree, [place], [AS_TRAINED], evaluation.text())[0].mode == mode


def test_it_is_said_which_checkpoint_and_mode_of_how_many_is_measured(tree, run):
    said = []
    evaluation.evaluate(
        tree, [SavedModel.find(run)], ["bf16", "FA_mxfp8"], evaluation.text(), said.append
    )
    assert said == ["one: bf16 (1 of 2)", "one: FA_mxfp8 (2 of 2)"]
    evaluation.evaluate(tree, [SavedModel.find(run)], ["bf16"], evaluation.text(), said.append)
    assert said[2:] == ["one: bf16"]


def test_what_the_program_says_of_a_checkpoint_is_told(tree, run):
    (run / "checkpoints/fail.json").write_text('{"found": "It is damaged", "expected": "none"}')
    with pytest.raises(CheckpointError, match=r"It is damaged\. Expected: none"):
        evaluation.evaluate(tree, [SavedModel.find(run)], ["bf16"], evaluation.text())


def test_a_place_is_a_run_a_folder_of_checkpoints_or_an_iteration(run, tmp_path):
    iteration = run / "checkpoints/iter_0000003"
    iteration.mkdir()
    (iteration / "metadata.json").write_text("{}")
    for path in (run, run / "checkpoints", iteration):
        place = SavedModel.find(path)
        assert (place.name, place.quant_config) == ("one", run / "quant.toml")
    assert SavedModel.find(run).folder == run / "checkpoints"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run / "cell.json").write_text(json.dumps({"experiment": {"checkpoint": str(elsewhere)}}))
    with pytest.raises(CheckpointError, match=f"checkpoint in {elsewhere}"):
        SavedModel.find(run)
    for number in (9, 10):
        (elsewhere / f"iter_{number:07d}").mkdir()
        (elsewhere / f"iter_{number:07d}/metadata.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"checkpoints \(9, 10\)") as error:
        SavedModel.find(run)
    tracker = elsewhere / "latest_checkpointed_iteration.txt"
    assert f"echo 10 > {tracker}" in error.value.help
    tracker.write_text("release")
    assert SavedModel.find(run) == SavedModel("one", elsewhere, run / "quant.toml")
    assert SavedModel.find(elsewhere) == SavedModel("elsewhere", elsewhere, None)


def test_a_text_is_of_one_kind(tmp_path):
    with pytest.raises(CheckpointError, match="--data and --text"):
        evaluation.text((tmp_path / "a",), tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"--tokenizer .*--text FILE"):
        evaluation.text(tokenizer=tmp_path)
    with pytest.raises(DataError, match=r"a\.bin and a\.idx"):
        evaluation.text((tmp_path / "a",))
    (tmp_path / "b").write_text("words")
    request = evaluation.text(file=tmp_path / "b", tokenizer=tmp_path, tokens=9)
    text = {"data": [], "text": tmp_path / "b", "tokenizer": tmp_path, "tokens": 9}
    assert request == {"choice": text}


def test_a_choice_that_means_nothing_is_refused():
    assert evaluation.sampling(tokens=3, cache=False)["cache"] is False
    with pytest.raises(CheckpointError, match=r"--top-k and --top-p .*--temperature 0"):
        evaluation.sampling(top_k=3)
    assert evaluation.sampling(temperature=1.0, top_p=0.5)["top_p"] == 0.5


def loss(value, mode="bf16", name="one"):
    return Loss(name, mode, {}, value, 8192, 256, ("a text",), 160, "float32", 1.0)


def test_the_table_fits_80_columns_and_counts_from_the_first_mode():
    text = loss_lines([loss(6.25), loss(6.5, "FA_linear_mxfp8"), loss(800.0, name="two")])
    assert text[0] == "one, iteration 160"
    assert text[2] == "8,192 tokens in windows of 256, float32"
    assert text[4].split() == ["bf16", "(unquantized)", "6.2500", "518.01"]
    assert text[5].split() == ["FA_linear_mxfp8", "6.5000", "665.14", "+0.2500"]
    assert text[6:8] == ["", "two, iteration 160"]
    assert text[-1].split()[-1] == "inf"
    assert max(map(len, text)) <= 80
    quantized = replace(loss(6.25), modelopt="int4_awq")
    assert loss_lines([quantized])[0] == "one, iteration 160, int4_awq by ModelOpt"


def test_the_command_prints_json(tree, run, command_line):
    words = ["eval", run, "--modes", "bf16,FA_mxfp?", "--tree", tree.root, "--json"]
    code, out, _ = command_line(*words)
    assert code == 0
    printed = json.loads(out)
    rows = [(row["mode"], row["perplexity"]) for row in printed["losses"]]
    assert rows[0] == ("bf16", pytest.approx(math.exp(6)))
    assert [mode for mode, _ in rows] == ["bf16", "FA_mxfp8", "FA_mxfp4"]


def test_rows_of_a_recipe_are_those_of_its_own_types_alone(tmp_path):
    path = tmp_path / "quant.toml"
    path.write_text(
        '[asked]\nfprop = "nvfp4"\ndgrad = "mxfp4"\n[operands]\n'
        '"fprop.weight" = { tile = "square" }\n"dgrad.weight" = { source = "fprop" }\n'
        '[[rules]]\nlayers = "a"\nquant_type = "none"\n'
    )
    rows = recipe_rows(path, {"fprop": "nvfp4"})
    assert rows["operands"] == {"fprop.weight": {"tile": "square"}}
    assert rows["rules"] == [{"layers": "a", "quant_type": "none"}]
    assert recipe_rows(path, {"fprop": "mxfp8"}) == {}
    assert recipe_rows(None, {"fprop": "nvfp4"}) == {}
    assert evaluation._options(path) == {}


def test_a_checkpoint_of_a_recipe_is_not_run_without_its_rows(tree, run, taken):
    (run / "checkpoints/rows").touch()
    options = (run / "quant.toml").rename(run / "moved.toml")
    place = SavedModel.find(run / "checkpoints")
    with pytest.raises(CheckpointError, match=rf"{place.folder} .*recipe.*quant\.toml"):
        evaluation.evaluate(tree, [place], [AS_TRAINED], evaluation.text())
    assert taken == []
    assert evaluation.evaluate(tree, [place], ["bf16"], evaluation.text())[0].mode == "bf16"
    options.rename(run / "checkpoints/quant.toml")
    place = SavedModel.find(run / "checkpoints")
    assert (
        evaluation.evaluate(tree, [place], [AS_TRAINED], evaluation.text())[0].types["fprop"]
        == "mxfp8"
    )


def test_rows_of_a_recipe_stay_in_a_later_phase(tmp_path):
    path = tmp_path / "quant.toml"
    path.write_text(
        '[asked]\nfprop = "nvfp4"\n[schedule]\nfprop = "nvfp4 until 0.5, then mxfp8"\n'
        '[[rules]]\nlayers = "a"\nquant_type = "none"\n'
    )
    assert recipe_rows(path, {"fprop": "mxfp8"})["rules"]
    assert recipe_rows(path, {"fprop": "hif4"}) == {}
