"""Which checkpoint is gone on from, what is cleared, and what is kept; on folders of our own."""

import json
import os
import tempfile
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqo.megatron.run import checkpoints
from mqo.megatron.run.checkpoints import (
    CheckpointError,
    before_load,
    before_save,
    choose,
    clear_unfinished,
    keep_last,
    remove_old,
)


@pytest.fixture(autouse=True)
def nothing_saved(monkeypatch):
    monkeypatch.setattr(checkpoints, "_saved", None)
    monkeypatch.setattr(checkpoints, "_begun", None)


@pytest.fixture
def folder(tmp_path):
    """A function that makes checkpoints of some iterations, and the tracker."""

    def make(*iterations, tracker=None):
        for iteration in iterations:
            (tmp_path / f"iter_{iteration:07d}").mkdir()
        text = str(max(iterations)) if tracker is None else tracker
        (tmp_path / checkpoints.TRACKER).write_text(text)
        (tmp_path / "progress.txt").write_text("")
        return tmp_path

    return make


def damaged(*iterations):
    """Stands for the look at the files."""

    def fault(path):
        return "a hash is off" if int(path.name[5:]) in iterations else None

    return fault


def left(folder):
    return sorted(int(path.name[5:]) for path in folder.glob("iter_*"))


def arguments(place, **more):
    rest = {"load": str(place), "save": str(place), "verify_integrity": True, "ckpt_step": None}
    return Namespace(**rest | more)


@pytest.fixture
def begin(monkeypatch):
    """A function that begins to load, of which iterations are damaged; the arguments after it."""

    def load(place, *bad, **more):
        monkeypatch.setattr(checkpoints, "fault", damaged(*bad))
        args = arguments(place, **more)
        before_load(args)
        return args

    return load


# -- which one ---------------------------------------------------------------------------------


def test_a_whole_newest_one_is_left_to_upstream(folder):
    assert choose(folder(2, 4, 6), damaged(2, 4)) is None


def test_the_newest_whole_one_before_a_damaged_one_is_chosen(folder):
    made = folder(2, 4, 6, 8)
    found, why = choose(made, damaged(6, 8))
    assert found == 4
    assert (made / checkpoints.TRACKER).read_text() == "4"
    assert why == "the checkpoint of iteration 8 is damaged (a hash is off)"


def test_a_folder_that_is_only_read_from_keeps_its_tracker(folder):
    made = folder(2, 4)
    assert choose(made, damaged(4), own=False)[0] == 2
    assert (made / checkpoints.TRACKER).read_text() == "4"


def test_one_beyond_the_tracker_was_not_saved_to_its_end(folder):
    assert choose(folder(2, 4, 6, tracker="4"), damaged(4))[0] == 2


def test_one_that_is_gone_is_damaged(folder):
    made = folder(2, tracker="4")
    with pytest.raises(CheckpointError, match=r"iteration 4 .*not exist"):
        choose(made, checkpoints.fault)


@pytest.mark.parametrize("text", ["", "4x", "-3"])
def test_an_unreadable_tracker_is_rewritten(folder, text):
    made = folder(2, 4, 6, tracker=text)
    found, why = choose(made, damaged(6))
    assert found == 4
    assert why.endswith("latest_checkpointed_iteration.txt names no iteration")
    assert (made / checkpoints.TRACKER).read_text() == "4"


def test_none_whole_is_an_error(folder):
    with pytest.raises(CheckpointError, match=r"before it.*--ckpt-step N"):
        choose(folder(2, 4), damaged(2, 4))


def test_nothing_is_to_be_chosen_without_a_tracker_or_of_a_release(folder, tmp_path):
    assert choose(tmp_path, damaged()) is None
    assert choose(folder(2, tracker="release"), damaged(2)) is None


def test_the_step_is_put_where_upstream_reads_it(folder, begin, capsys):
    assert begin(folder(2, 4), 4, save=None).ckpt_step == 2
    said = (
        "mqo: the checkpoint of iteration 4 is damaged (a hash is off); resuming from iteration 2"
    )
    assert capsys.readouterr().out == said + "\n"


@pytest.mark.parametrize(
    "change", [{"verify_integrity": False}, {"ckpt_step": 4}, {"load": None}], ids=str
)
def test_what_the_user_chose_or_nobody_can_tell_is_left(folder, monkeypatch, change):
    monkeypatch.setattr(checkpoints, "fault", damaged(4))
    args = arguments(folder(2, 4), **{"save": None} | change)
    before = dict(vars(args))
    before_load(args)
    assert vars(args) == before


# -- without a tracker -------------------------------------------------------------------------


@pytest.fixture
def untracked(tmp_path):
    """A function that makes complete checkpoints of some iterations, and no tracker."""

    def make(*iterations, begun=(), place=tmp_path):
        for iteration in (*iterations, *begun):
            checkpoint = place / f"iter_{iteration:07d}"
            checkpoint.mkdir(parents=True)
            (checkpoint / "__0_0.distcp").write_bytes(b"numbers")
            if iteration not in begun:
                (checkpoint / "metadata.json").write_text("{}")
        return place

    return make


def test_the_newest_whole_one_is_taken_and_the_tracker_is_written(untracked, begin, capsys):
    made = untracked(2, 4, 6)
    args = begin(made, 6)
    assert args.ckpt_step == 4
    assert (made / checkpoints.TRACKER).read_text() == "4"
    said = capsys.readouterr().out
    assert f"{made} has checkpoints (2, 4, 6) and no {checkpoints.TRACKER}" in said
    assert "from iteration 4" in said
    assert left(made) == [2, 4, 6]


def test_of_a_folder_that_is_only_read_from_the_step_is_taken(untracked, begin):
    made = untracked(2, 4)
    assert begin(made, save=None).ckpt_step == 4
    assert not (made / checkpoints.TRACKER).exists()


def test_a_run_does_not_fall_back_to_the_pretrained_model_beside_its_own(untracked, begin):
    made = untracked(2)
    args = begin(made, pretrained_checkpoint="elsewhere")
    assert args.ckpt_step == 2
    assert checkpoints.load_folder(args) == made


@pytest.mark.parametrize("verify", [True, False])
def test_where_none_is_known_to_be_whole_the_run_is_refused(untracked, verify):
    made = untracked(2, 4)  # without hashes
    with pytest.raises(CheckpointError, match=rf"\(2, 4\).*{checkpoints.TRACKER}.*--ckpt-step N"):
        before_load(arguments(made, verify_integrity=verify))
    assert left(made) == [2, 4]


def test_a_release_without_a_tracker_is_refused(tmp_path):
    (tmp_path / "release").mkdir()
    with pytest.raises(CheckpointError, match=rf"\(release\).*{checkpoints.TRACKER}"):
        before_load(arguments(tmp_path))


def test_a_pretrained_model_without_a_tracker_is_refused(untracked, tmp_path, begin):
    made = untracked(2, place=tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=rf"theirs .*\(2\).*{checkpoints.TRACKER}"):
        begin(tmp_path, load=None, pretrained_checkpoint=str(made))


def test_what_a_kill_left_of_the_first_save_is_no_checkpoint(untracked, begin):
    made = untracked(begun=[2])
    assert begin(made).ckpt_step is None
    assert not (made / checkpoints.TRACKER).exists()
    before_save(Namespace(save=str(made)), 2)
    assert left(made) == []


def test_a_first_save_that_was_killed_while_it_was_hashed_is_no_checkpoint(untracked, begin):
    before_save(Namespace(save=str(untracked())), 2)
    made = untracked(2)  # its metadata is there; its hashes are not yet
    assert begin(made, 2).ckpt_step is None
    before_save(Namespace(save=str(made)), 2)
    assert left(made) == []


def test_what_marks_the_first_save_goes_when_it_is_done(untracked):
    made = untracked()
    before_save(Namespace(save=str(made)), 2)
    keep_last(0)
    assert (made / checkpoints.FIRST_SAVE).exists()  # the tracker is not there: it goes on
    before_save(Namespace(save=str(made)), 2)
    (made / checkpoints.TRACKER).write_text("2")
    keep_last(0)
    assert not (made / checkpoints.FIRST_SAVE).exists()


@pytest.mark.parametrize("content", [b"", b"iter_0000004", b"\xff"])
def test_a_mark_of_another_iteration_hides_none(untracked, content):
    made = untracked(2)
    (made / checkpoints.FIRST_SAVE).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"\(2\).*{checkpoints.TRACKER}"):
        before_load(arguments(made, verify_integrity=False))


def test_a_tracker_that_cannot_be_written_is_named(untracked, begin):
    made = untracked(2)
    (made / f"{checkpoints.TRACKER}.new").mkdir()  # as a folder of another user, even for root
    with pytest.raises(CheckpointError, match=rf"{checkpoints.TRACKER} .*\(Is a directory\)"):
        begin(made)


def test_the_step_that_the_user_chose_needs_no_tracker(untracked, begin):
    assert begin(untracked(2, 4), 2, 4, ckpt_step=2).ckpt_step == 2


def test_a_complete_one_is_moved_aside_before_its_iteration_is_saved_again(untracked, capsys):
    made = untracked(2, 4)
    for times in (1, 2):
        before_save(Namespace(save=str(made)), 4)
        (made / checkpoints.FIRST_SAVE).unlink()  # a mark would say that it is unfinished
        assert left(made) == [2]
        assert len(list(made.glob("old*_iter_0000004"))) == times
        untracked(4)
    assert "old1_iter_0000004" in capsys.readouterr().out


# -- the look at the files ---------------------------------------------------------------------


def test_a_folder_without_a_manifest_is_not_whole(folder):
    pytest.importorskip("megatron.core.dist_checkpointing.validation")
    assert "no integrity.json" in checkpoints.fault(folder(2) / "iter_0000002")


def test_a_changed_byte_and_a_missing_file_are_seen(folder):
    validation = pytest.importorskip("megatron.core.dist_checkpointing.validation")
    checkpoint = folder(2) / "iter_0000002"
    (checkpoint / "common.pt").write_bytes(b"words")
    (checkpoint / "__0_0.distcp").write_bytes(b"numbers")
    validation.save_integrity_manifest(str(checkpoint))
    assert checkpoints.fault(checkpoint) is None
    (checkpoint / "__0_0.distcp").write_bytes(b"numbars")
    assert "__0_0.distcp: hash mismatch" in checkpoints.fault(checkpoint)
    (checkpoint / "__0_0.distcp").unlink()
    assert "__0_0.distcp: file missing" in checkpoints.fault(checkpoint)
    (checkpoint / checkpoints.MANIFEST).write_text("{")
    assert checkpoints.fault(checkpoint)


MALFORMED = {
    "a list of files": b'{"files": []}',
    "no files": b'{"files": {}}',
    "null files": b'{"files": null}',
    "no hash": b'{"files": {"__0_0.distcp": null}}',
    "a nested hash": b'{"files": {"__0_0.distcp": {"sha256": "0"}}}',
    "another table": b'{"hashes": {}}',
    "null": b"null",
    "a number": b"7",
    "a list": b"[1]",
    "half a file": b'{"files": {',
    "nothing": b"",
    "no text": b"\xff\xfe\x00",
    "too deep": b"[" * 100_000,
    "another algorithm": b'{"algorithm": 5, "files": {"__0_0.distcp": "0"}}',
    "a name that is none": b'{"files": {"a\\u0000b": "0"}}',
    "a name without an encoding": b'{"files": {"\\ud800": "0"}}',
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_manifest_is_a_fault_and_the_one_before_is_taken(folder, content):
    validation = pytest.importorskip("megatron.core.dist_checkpointing.validation")
    made = folder(2, 4)
    for iteration in (2, 4):
        checkpoint = made / f"iter_{iteration:07d}"
        (checkpoint / "__0_0.distcp").write_bytes(b"numbers")
        validation.save_integrity_manifest(str(checkpoint))
    (made / "iter_0000004" / checkpoints.MANIFEST).write_bytes(content)
    found, why = choose(made, checkpoints.fault)
    assert found == 2
    assert "iteration 4 is damaged" in why


@given(
    st.binary()
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["files", "algorithm", "x"]) | st.text(), inner)
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_no_content_of_a_manifest_is_more_than_a_fault(content):
    pytest.importorskip("megatron.core.dist_checkpointing.validation")
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / checkpoints.MANIFEST).write_bytes(content)
        assert checkpoints.fault(Path(place))


def test_a_manifest_of_absurd_size_is_not_read(folder):
    checkpoint = folder(2) / "iter_0000002"
    with (checkpoint / checkpoints.MANIFEST).open("wb") as file:
        file.truncate(1 << 40)
    assert "bytes" in checkpoints.manifest_fault(checkpoint / checkpoints.MANIFEST)


def test_a_malformed_manifest_of_another_folder_is_named(folder):
    checkpoint = folder(2) / "iter_0000002"
    (checkpoint / checkpoints.MANIFEST).write_text('{"files": []}')
    with pytest.raises(CheckpointError, match=r"integrity\.json .*no files"):
        checkpoints.to_verify(Namespace(verify_integrity=True), str(checkpoint))


def test_a_checkpoint_is_held_against_hashes_where_it_has_any(folder):
    checkpoint = folder(2) / "iter_0000002"
    assert not checkpoints.to_verify(Namespace(verify_integrity=True), str(checkpoint))
    (checkpoint / checkpoints.MANIFEST).write_text('{"files": {"common.pt": "0"}}')
    assert checkpoints.to_verify(Namespace(verify_integrity=True), str(checkpoint))
    assert not checkpoints.to_verify(Namespace(verify_integrity=False), str(checkpoint))
    chosen = Namespace(verify_integrity=True, ckpt_step=2)
    assert not checkpoints.to_verify(chosen, str(checkpoint))


# -- clearing and keeping ----------------------------------------------------------------------


def test_what_a_kill_left_of_an_iteration_is_cleared_and_what_is_done_is_not(folder):
    made = folder(2, 4, 6, tracker="4")
    clear_unfinished(made, 6)
    clear_unfinished(made, 4)
    clear_unfinished(made, 8)
    assert left(made) == [2, 4]


def test_old_ones_go_up_to_the_trackers(folder):
    made = folder(2, 4, 6, 8, 10, tracker="8")
    remove_old(made, 2)
    assert left(made) == [6, 8, 10]


def test_links_stay(folder, tmp_path):
    made = folder(4, 6, 8)
    (tmp_path / "elsewhere").mkdir()
    (made / "iter_0000002").symlink_to(tmp_path / "elsewhere")
    remove_old(made, 1)
    clear_unfinished(made, 2)
    assert left(made) == [2, 8]


def test_a_run_keeps_the_last_ones_of_those_it_saves(folder):
    made = folder(2, 4, 6)
    keep_last(1)
    assert left(made) == [2, 4, 6]  # it has saved none
    before_save(Namespace(save=str(made)), 8)
    (made / "iter_0000008").mkdir()
    (made / checkpoints.TRACKER).write_text("8")
    keep_last(0)
    assert left(made) == [2, 4, 6, 8]
    before_save(Namespace(save=str(made)), 10)
    keep_last(2)
    assert left(made) == [6, 8]


def test_without_a_tracker_nothing_goes(tmp_path):
    (tmp_path / "iter_0000002").mkdir()
    remove_old(tmp_path, 1)
    assert left(tmp_path) == [2]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("name", ["integrity.json", "shard"])
def test_a_manifest_holds_up_no_check(tmp_path, name, make):
    (tmp_path / "integrity.json").write_text(json.dumps({"files": {"shard": "00"}}))
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    assert checkpoints.manifest_fault(tmp_path / "integrity.json")
    if name == "shard":
        assert name in checkpoints.fault(tmp_path)
