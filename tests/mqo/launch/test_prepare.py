"""What is refused before anything is prepared."""

import struct

import pytest
from mqo.data.pair_check import HEADER, MAGIC
from mqo.errors import DataError, EditedError, LayoutError, OverlayError
from mqo.launch.config import Cluster, resolve
from mqo.launch.prepare import check_config, note_checkpoint, ready_tree
from mqo.megatron.run.files import TRACKER
from mqo.overlay.series import Series
from mqo.project import Project

from ..conftest import materialize


def cell(dataset="wikipedia", training="smoke", **rest):
    return resolve("llama32-1b", dataset, "bf16", training, **rest)


@pytest.fixture
def tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("dataset", ["wikipedia", "dolma"])
def test_the_sample_serves_the_smoke_configuration(dataset):
    check_config(cell(dataset=dataset))


def test_a_real_configuration_wants_real_data():
    with pytest.raises(DataError, match=r"data .*for wikipedia;.*TOKENIZER DATA_PREFIX"):
        check_config(cell(training="fast"))


def test_a_length_that_is_no_number_is_refused():
    with pytest.raises(LayoutError, match="train-iters"):
        check_config(cell(extra_flags=("--train-iters", "abc")))


def test_a_dataset_without_a_sample_wants_data():
    bare = cell(dataset="dolma")
    corpus = bare.experiment.dataset.model_copy(update={"sample": False})
    bare = bare.changed("experiment", dataset=corpus)
    with pytest.raises(DataError, match=r"data .*for dolma;.*TOKENIZER DATA_PREFIX"):
        check_config(bare)


def test_several_nodes_want_a_place_to_save_that_they_share(tmp_path):
    where = Cluster(nnodes=2, nproc_per_node=2)
    with pytest.raises(DataError, match=r"2 nodes .*CHECKPOINT"):
        check_config(cell(cluster=where, extra_flags=("--micro-batch-size", "1")))
    check_config(
        cell(cluster=where, extra_flags=("--micro-batch-size", "1"), checkpoint=tmp_path / "new")
    )


def test_a_missing_data_file_is_named(tmp_path, tokenizer):
    (tmp_path / "corpus.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"corpus\.idx"):
        check_config(cell(tokenizer=tokenizer, data_prefix=tmp_path / "corpus"))


def test_a_missing_tokenizer_is_named(tmp_path):
    one_document = HEADER.pack(*MAGIC, 8, 1, 2) + struct.pack("<iqqq", 1, 0, 0, 1)
    (tmp_path / "corpus.idx").write_bytes(one_document)
    (tmp_path / "corpus.bin").write_bytes(b"xy")
    with pytest.raises(DataError, match=r"tokenizer .*/nowhere "):
        check_config(cell(tokenizer=tmp_path / "nowhere", data_prefix=tmp_path / "corpus"))


def test_tokenizer_and_data_come_together(tokenizer):
    with pytest.raises(DataError, match="one of TOKENIZER and DATA_PREFIX"):
        check_config(cell(tokenizer=tokenizer))


def test_a_tree_of_another_version_is_refused(tmp_path):
    pin = Project.here().upstream_pin.read_text()
    (tmp_path / "Megatron-LM").mkdir()
    (tmp_path / "Megatron-LM" / "UPSTREAM.toml").write_text(pin)
    materialize(tmp_path / "Megatron-LM", {}, version="0.16.1")
    with pytest.raises(OverlayError, match=r"megatron-core 0\.16\.1.*0\.19\.2.*`mqo vendor`"):
        ready_tree(Project(tmp_path), Series(()), print, allow_edits=False)


def test_a_tree_with_any_hand_edit_is_refused_before_a_run(mini, monkeypatch):
    pin = Project.here().upstream_pin.read_text().replace('"0.19.2"', '"1.2.3"')
    project = Project(mini.tree.root.parent)
    for name in ("tree", "ours"):
        monkeypatch.setattr(Project, name, mini.tree.root)
    (mini.tree.root / "UPSTREAM.toml").write_text(pin)
    ready_tree(project, mini.series, print, allow_edits=False)
    mini.edit("core/plain.py", b"42", b"43")
    with pytest.raises(EditedError, match=r"core/plain\.py.*mqo vendor --force"):
        ready_tree(project, mini.series, print, allow_edits=False)


@pytest.fixture
def trained(tmp_path):
    """A run's folder with a checkpoint."""
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints" / TRACKER).write_text("160")
    return tmp_path / "run"


def test_a_teacher_is_a_run_or_its_checkpoints(trained):
    for path in (trained, trained / "checkpoints"):
        check_config(cell(teacher=path))


def test_the_checkpoint_that_a_run_goes_on_from_is_said(trained):
    folder, said = trained / "checkpoints", []

    def noted(**given):
        said.clear()
        note_checkpoint(cell(**given).experiment, said.append)
        return " ".join(said)

    tracker = folder / TRACKER
    assert noted() == ""
    assert f"iteration {tracker.read_text()} in {folder}" in noted(checkpoint=folder)
    assert "step 160 of 160; only the final validation" in noted(checkpoint=folder)
    tracker.write_text("159")
    assert "final validation" not in noted(checkpoint=folder)
    tracker.write_text("")  # as a kill may leave it
    assert noted(checkpoint=folder) == ""
    tracker.unlink()
    assert noted(checkpoint=folder) == ""
    (folder / "iter_0000160").mkdir()
    (folder / "iter_0000160/metadata.json").write_text("{}")
    assert f"no {TRACKER}" in noted(checkpoint=folder) and "160" in said[0]


def test_a_distillation_that_cannot_start_is_refused(trained, tmp_path):
    gone = tmp_path / "gone.yaml"
    for given, says in (
        ({"teacher": tmp_path}, f"teacher in {tmp_path}"),
        ({"teacher": trained, "distillation_config": gone}, r"configuration .*gone\.yaml"),
        ({"distillation_config": gone}, r"--distillation-config .*--teacher"),
        ({"teacher": trained, "megatron": tmp_path}, f"--teacher .*--megatron {tmp_path}"),
    ):
        with pytest.raises(DataError, match=says):
            check_config(cell(**given))
