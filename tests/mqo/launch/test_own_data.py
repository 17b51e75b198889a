"""The options for data of the user: what they give a run, and which of them exclude each other."""

import json

import pytest
from mqo.errors import DataError, MissingError, MqoError
from mqo.launch import arguments
from mqo.launch.config import RunConfig
from mqo.launch.own_data import of_options
from mqo.launch.prepare import check_config, text_note
from mqo.project import Project
from mqo.runs import RunFolder

WORDS = ["--model", "llama32-1b", "--quantization", "bf16"]


def cell(*words, training="tiny"):
    own, extra = arguments.split_flags([*WORDS, "--training-config", training, *map(str, words)])
    return arguments.config_from(arguments.parser().parse_intermixed_args(own), extra)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "my tales.jsonl"
    path.write_text("".join(json.dumps({"text": f"Tale {n}."}) + "\n" for n in range(9)))
    return path


@pytest.fixture
def tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    return folder


def test_the_options_are_the_same_as_the_arguments():
    assert cell("ck", "tb", "--data", "data", "--tokenizer", "tok") == cell(
        "ck", "tb", "tok", "data"
    )


@pytest.mark.parametrize(
    "words",
    [
        ("c", "t", "tok", "data", "--data", "data"),
        ("c", "t", "tok", "--tokenizer", "tok"),
        ("c", "t", "tok", "data", "--text", "TEXT"),
        ("--data", "data", "--text", "TEXT"),
        ("--text", "TEXT", "--", "--data-path", "data"),
        ("--text", "TEXT", "--", "--mock-data"),
        ("--text", "TEXT", "--", "--tokenizer-model", "tok"),
        ("--dataset", "wikipedia", "--strict"),
    ],
)
def test_options_that_exclude_each_other_are_refused(text, words):
    with pytest.raises(MqoError) as caught:
        cell(*(text if word == "TEXT" else word for word in words))
    assert caught.value.expected


def test_a_run_is_named_after_its_texts(text, tmp_path):
    (tmp_path / "b.txt").write_text("A tale.")
    assert cell("--text", text).title == "llama32-1b_my-tales_bf16_tiny"
    assert cell("--text", text, tmp_path / "b.txt").experiment.dataset.name == "my-tales+b"
    assert cell("--text", text, "--dataset", "fables").experiment.dataset.name == "fables"
    wikipedia = cell("--text", text, "--dataset", "wikipedia")  # as the scripts have it
    assert wikipedia.experiment.dataset.name == "my-tales"
    assert not wikipedia.experiment.dataset.sample


def test_a_run_keeps_the_digests_of_its_texts(text, tmp_path):
    made = cell("--text", text)
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    made.write(run)
    assert RunConfig.read(run) == made
    ((path, digest),) = made.experiment.text.files.items()
    assert path == str(text)
    text.write_text(text.read_text() + "\n")
    assert cell("--text", text).experiment.text.files[path] != digest


def test_a_small_model_trains_on_a_text_alone_and_a_published_one_with_a_tokenizer(text, tokenizer):
    check_config(cell("--text", text))
    with pytest.raises(MissingError, match="--tokenizer FOLDER"):
        check_config(cell("--text", text, training="fast"))
    made = cell("--text", text, "--tokenizer", tokenizer)
    assert made.experiment.tokenizer == tokenizer
    assert made.experiment.text.tokenizer


def test_a_dry_run_tells_of_the_text_and_prepares_nothing(text, tmp_path):
    project = Project(tmp_path / "checkout")
    data = of_options(project, [text], None, None)
    experiment = cell("--text", text).changed("experiment", **data.fields).experiment
    note = text_note(project, experiment)
    for part in ("9 documents", str(text), "10%", str(project.own_data)):
        assert part in note
    assert not project.own_data.exists()
    text.write_text(text.read_text() + "{}\n")
    assert "1 record" in text_note(project, experiment)
    strict = of_options(project, [text], None, None, strict=True)
    with pytest.raises(DataError, match=r"my tales\.jsonl:10"):
        text_note(project, experiment.model_copy(update=strict.fields))
