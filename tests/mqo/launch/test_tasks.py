"""`mqo eval --tasks` around its program: one of our own stands in for it."""

import importlib.util
import json

import pytest
from mqo.errors import CheckpointError, SetupError
from mqo.extras import require
from mqo.launch import evaluation, tasks
from mqo.launch.forward_pass import SavedModel
from mqo.launch.tasks import HELD_OUT, Score

# Says what it was told, and scores one metric of each task.
PROGRAM = """
import json
from pathlib import Path

def tasks(checkpoint: Path, names: list[str], **words):
    (checkpoint / "told.json").write_text(json.dumps(words | {"names": names}))
    rows = [
        {"task": name, "metric": "acc", "filter": "none", "value": 0.5, "stderr": None,
         "documents": 4, "shots": 0, "version": 1.0}
        for name in names
    ]
    return {"scores": rows, "window": 4, "iteration": 3, "dtype": "float32", "seconds": 1.0}
"""


@pytest.fixture(autouse=True)
def present(monkeypatch):
    """The package, also where it is not installed."""
    monkeypatch.setattr(tasks, "require", lambda name: None)


@pytest.fixture
def place(tmp_path):
    """A folder of checkpoints."""
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run/latest_checkpointed_iteration.txt").write_text("3")
    return SavedModel.find(tmp_path / "a run")


@pytest.fixture
def tree(patched, monkeypatch):
    """The tree in miniature, of whose snapshots the program is all."""

    def snapshot(tree, target, *, types):
        (target / "tools").mkdir(parents=True)
        (target / evaluation.EVALUATE).write_text(PROGRAM)

    monkeypatch.setattr(evaluation, "snapshot", snapshot)
    return patched.tree


def score(value=0.5, mode="bf16", **rest):
    fields = {"checkpoint": "one", "task": "a_task", "metric": "acc", "filter": "none"}
    fields |= {"stderr": 0.01, "documents": 1200, "shots": 0, "version": 1.0} | rest
    return Score(
        mode=mode,
        types={},
        value=value,
        window=64,
        iteration=6,
        dtype="float32",
        seconds=1.0,
        **fields,
    )


def test_the_package_is_missed_before_anything_starts(monkeypatch):
    monkeypatch.setattr(tasks, "require", require)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"lm-eval .*'tasks'.*pip install"):
        tasks.options(HELD_OUT, evaluation.text())


def test_what_means_nothing_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=f"--tasks .*{HELD_OUT}"):
        tasks.options(" , ", evaluation.text())
    with pytest.raises(CheckpointError, match=f"{tmp_path}/nowhere"):
        tasks.options("one", evaluation.text(), folder=tmp_path / "nowhere")
    (tmp_path / "a text").write_text("words")
    text = evaluation.text(file=tmp_path / "a text")
    with pytest.raises(CheckpointError, match=r"^--text .*--limit"):
        tasks.options("one", text)
    with pytest.raises(CheckpointError, match=r"^--tokens .*--limit"):
        tasks.options(HELD_OUT, evaluation.text(file=tmp_path / "a text", tokens=9))
    assert tasks.options(f"one,{HELD_OUT}", text)["choice"] == text["choice"]


def test_the_program_is_told_of_each_task_once(tree, place, tmp_path):
    choice = {"folder": tmp_path, "limit": 5, "shots": 0}
    request = tasks.options("one, two,one", evaluation.text(), tokenizer=tmp_path, **choice)
    found = tasks.evaluate(tree, [place], ["bf16", "mxfp4"], request)
    assert [(row.mode, row.task) for row in found] == [
        (mode, task) for mode in ("bf16", "mxfp4") for task in ("one", "two")
    ]
    assert found[2].types == dict.fromkeys(("fprop", "qk", "pv"), "mxfp4")
    told = json.loads((place.folder / "told.json").read_text())
    assert told.pop("platform") and told.pop("ignored") == []
    text = {"data": [], "tokens": None, "tokenizer": str(tmp_path)}
    assert told == choice | {"folder": str(tmp_path), "names": ["one", "two"], "choice": text}


def test_the_table_fits_80_columns_and_puts_modes_below_one_another():
    rows = [
        score(mode=mode, metric=metric, filter=kind, value=value)
        for mode in ("bf16", "FA_linear_fp8_tensor_e4m3")
        for metric, kind, value in (
            ("acc", "none", 0.25),
            ("exact_match", "strict-match", 1.0),
            ("word_perplexity", "none", 853120.0),
        )
    ]
    text = tasks.score_lines([*rows, score("a text", checkpoint="two", stderr=None, shots=5)])
    assert max(map(len, text)) <= 80
    assert text[0] == "one, iteration 6"
    places = [line.split() for line in text]
    first = places.index(["acc", "bf16", "(unquantized)", "0.2500", "0.0100", "1,200"])
    assert text[first - 1] == "a_task"
    assert places[first + 1][:2] == ["acc", "FA_linear_fp8_tensor_e4m3"]
    assert "a_task, strict-match" in text
    assert ["word_perplexity", "bf16", "(unquantized)", "8.5312e+05", "0.0100", "1,200"] in places
    assert text[-2] == "a_task, 5-shot"
    assert places[-1] == ["acc", "bf16", "(unquantized)", "a", "text", "1,200"]


def test_the_command_prints_json(tree, place, command_line):
    words = ("eval", place.folder, "--modes", "bf16", "--tree", tree.root)
    code, out, _ = command_line(*words, "--tasks", "one", "--json")
    assert code == 0
    (row,) = json.loads(out)["tasks"]
    assert (row["task"], row["value"], row["stderr"], row["documents"]) == ("one", 0.5, None, 4)
    code, _, err = command_line(*words, "--num-fewshot", "0")
    assert (code, "--tasks" in err) == (2, True)
