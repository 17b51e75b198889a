"""Files that a program would wait for are refused before it is started."""

import pytest
from mqo.errors import CheckpointError, ConvertError
from mqo.launch.checkpoints import require_tracker
from mqo.launch.evaluation import text
from mqo.launch.forward_pass import SavedModel
from mqo.megatron.run.files import TRACKER

from ..odd_files import ODD


@pytest.fixture
def folder(tmp_path):
    """A folder of checkpoints."""
    newest = tmp_path / "saved/iter_0000002"
    newest.mkdir(parents=True)
    (newest / "modelopt_state").mkdir()
    for name in ("metadata.json", ".metadata", "__0_0.distcp"):
        (newest / name).write_text("{}")
    (newest.parent / TRACKER).write_text("2")
    return newest.parent


def test_regular_files_and_folders_are_taken(folder):
    require_tracker(folder, ConvertError, "a run")
    assert SavedModel.find(folder).folder == folder
    assert SavedModel.find(folder / "iter_0000002").folder == folder / "iter_0000002"


@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_another_kind_of_file_is_refused_by_name(folder, name, make):
    path = folder / "iter_0000002" / name
    path.unlink()
    make(path)
    with pytest.raises(ConvertError, match=name):
        require_tracker(folder, ConvertError, "a run")
    for place in (folder, path.parent):
        with pytest.raises(CheckpointError, match=name):
            SavedModel.find(place)


@pytest.mark.parametrize("make", ODD)
def test_a_text_and_a_tokenizer_are_regular_files(tmp_path, make):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "text").write_text("words")
    assert text(file=tmp_path / "text", tokenizer=tmp_path / "tokenizer")
    make(tmp_path / "tokenizer/tokenizer.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        text(file=tmp_path / "text", tokenizer=tmp_path / "tokenizer")
    make(tmp_path / "odd")
    with pytest.raises(CheckpointError, match="odd"):
        text(file=tmp_path / "odd")
