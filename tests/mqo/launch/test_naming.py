"""What a run is called: its data, its model, what it quantizes; in the folder and elsewhere."""

import pytest
from mqo.errors import DataError, MqoError, UnknownNameError
from mqo.launch import arguments, naming
from mqo.launch.config import resolve
from mqo.launch.flags import RunData
from mqo.launch.prepare import check_config
from mqo.matrix import tables

WORDS = ["--model", "llama32-1b", "--quantization", "bf16", "--training-config", "tiny"]


def cell(*words):
    own, extra = arguments.split_flags([*WORDS, *words])
    return arguments.config_from(arguments.parser().parse_intermixed_args(own), extra)


def test_own_data_have_any_name():
    made = cell("--dataset", "my-data.v2", "ck", "tb", "tok", "corpus_text_document")
    assert made.experiment.dataset.name == "my-data.v2"
    assert made.title == "llama32-1b_my-data.v2_bf16_tiny"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["ck", "tb", "tok", "/data/corpus_text_document"], "corpus"),
        (["ck", "tb", "tok", "a b/my corpus"], "my-corpus"),
        (["ck", "tb", "tok", "été_text_document"], "t"),
        (["ck", "tb", "tok", "___"], "data"),
        (["--", "--data-path", "x/code_text_document"], "code"),
        (["--", "--data-path=x/code_text_document"], "code"),
        (["--", "--data-path", "0.3", "x/code", "0.7", "x/web"], "code"),
        (["--", "--data-path", "a folder/code_text_document"], "code"),
        (["--", "--train-data-path", "x/web"], "web"),
        (["--", "--data-args-path", "x/blend.txt"], "blend.txt"),
        (["--", "--mock-data"], "mock-data"),
    ],
)
def test_without_a_name_a_run_is_named_after_its_data(words, name):
    assert cell(*words).experiment.dataset.name == name


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "-x", "é", "a" * 65, "a\0", "a\n"])
def test_a_name_that_does_not_fit_a_folder_is_refused(name):
    with pytest.raises(MqoError) as caught:
        cell(f"--dataset={name}", "ck", "tb", "tok", "data")
    assert f"dataset cannot be called {name!r}" in caught.value.found
    with pytest.raises(MqoError) as caught:
        cell("--dataset", "wikipedia", f"--name={name}")
    assert f"model cannot be called {name!r}" in caught.value.found


def test_a_name_alone_is_that_of_a_known_dataset():
    with pytest.raises(UnknownNameError, match=r"dataset .*'mydata'.*wikipedia"):
        cell("--dataset", "mydata")
    with pytest.raises(MqoError, match=r"--dataset .*--list"):
        cell()


def test_a_known_dataset_keeps_its_row_with_own_data():
    """The documented scripts name one; without data it would be the sample."""
    made = cell("--dataset", "dolma", "ck", "tb", "tok", "corpus")
    assert made.experiment.dataset == tables.datasets()["dolma"]


def test_data_and_tokenizer_behind_two_dashes_replace_the_sample(tmp_path):
    made = cell("--", "--data-path", str(tmp_path / "web"), "--tokenizer-model", str(tmp_path))
    assert RunData.given(made.experiment) == RunData(tmp_path, tmp_path / "web", None)
    check_config(made)
    with pytest.raises(DataError, match=r"tokenizer .*for web;.*TOKENIZER DATA_PREFIX"):
        check_config(cell("--", "--data-path", str(tmp_path / "web")))


# -- models ----------------------------------------------------------------------------------------


def model(*flags, of="llama32-1b", training="tiny", name=None):
    made = resolve(of, "wikipedia", "bf16", training, extra_flags=flags, name=name)
    return made.experiment.model_name


@pytest.mark.parametrize("of", tables.script_models())
@pytest.mark.parametrize("training", tables.trainings())
def test_a_configuration_that_shrinks_a_model_leaves_its_name(of, training):
    assert model(of=of, training=training) == of


def test_a_changed_model_is_marked_unless_the_user_names_it():
    flags = ("--num-layers", "6", "--hidden-size", "512")
    assert model(*flags) == "llama32-1b*"
    assert model(*flags, name="qwen-like") == "qwen-like"
    config = resolve("llama32-1b", "wikipedia", "bf16", "tiny", extra_flags=flags)
    assert config.title == "llama32-1b-changed_wikipedia_bf16_tiny"


# -- schedules -------------------------------------------------------------------------------------


def test_a_schedule_is_part_of_label_and_folder():
    schedule = ("linear: mxfp4 until 0.9, then bf16", "qk: mxfp8")
    made = resolve("llama32-1b", "wikipedia", "linear_mxfp4", "tiny", schedule=schedule)
    assert made.mode_label == "linear_mxfp4, linear: mxfp4 until 0.9, then bf16, qk: mxfp8"
    part = "linear_mxfp4-linear-mxfp4-until-0.9-then-bf16-qk-mxfp8"
    assert made.title == f"llama32-1b_wikipedia_{part}_tiny"


def test_a_scheduled_run_of_bf16_is_not_called_unquantized():
    made = resolve("llama32-1b", "wikipedia", "bf16", "tiny", schedule=("qk: bf16 until 4",))
    assert "unquantized" not in made.mode_label
    assert made.mode_label != tables.UNQUANTIZED


def test_any_title_is_the_name_of_one_folder():
    schedule = tuple(f"{site}: mxfp4 until 0.9, then bf16" for site in tables.SITES)
    made = resolve("llama32-1b", "wikipedia", "mxfp4", "tiny", schedule=schedule)
    assert len(made.title) < 200
    assert "/" not in naming.folder_part("a/b")
