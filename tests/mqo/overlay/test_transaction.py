import errno
import os
import shutil
from pathlib import Path

import pytest
from mqo.errors import DiskFullError, OverlayError
from mqo.overlay import transaction
from mqo.overlay.transaction import Change, building, commit, recover

from ..conftest import contents
from .killing import (
    BUILD_PHASES,
    COMMIT_PHASES,
    ROLLED_BACK,
    StoppedError,
    events_until,
    in_child,
    kill_me,
    killed_at,
    steps_of,
    stopper,
)

CHANGES = (
    Change("a.py", b"after\r\n"),
    Change("core/b.py", b"\xef\xbb\xbfafter", 0o750),
    Change("core/gone.py", None),
    Change("only/one/gone.py", None),
    Change("new/deep/c.py", b"", 0o600),
)
RECORDS = {"manifest.json": b"after", "upstream.json": None, "objects/2": b"2", "objects/1": None}


def make(root):
    files = {"a.py": 0o755, "core/b.py": 0o640, "core/gone.py": 0o644, "only/one/gone.py": 0o600}
    records = {".mqo/upstream.json": 0o644, ".mqo/manifest.json": 0o644, ".mqo/objects/1": 0o644}
    for path, mode in {**files, **records}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"before\n")
        (root / path).chmod(mode)
    return root


@pytest.fixture
def root(tmp_path):
    return make(tmp_path / "tree")


def change(root):
    commit(root, CHANGES, RECORDS, command="apply")


@pytest.fixture
def ends(tmp_path):
    """The two states that a tree may be found in."""
    before, after = make(tmp_path / "before"), make(tmp_path / "after")
    change(after)
    return contents(before), contents(after)


def fresh(root):
    shutil.rmtree(root)
    return make(root)


def build(root, text="whole"):
    target = root.parent / "runs/7/source"
    with building(root, target, command="snapshot") as folder:
        (folder / "sub").mkdir()
        (folder / "sub/x.py").write_text(text)
        (folder / "y.py").write_text(text)


def clear(root):
    shutil.rmtree(root.parent / "runs", ignore_errors=True)
    return fresh(root)


def occurrences(counted):
    return [(name, number) for name in counted for number in range(1, counted[name] + 1)]


# -- all goes well -----------------------------------------------------------------------------


def test_a_commit_writes_deletes_and_sets_modes(root):
    change(root)
    assert (root / "a.py").read_bytes() == b"after\r\n"
    modes = {path: (root / path).stat().st_mode & 0o777 for path in ("a.py", "core/b.py")}
    assert modes == {"a.py": 0o755, "core/b.py": 0o750}
    assert (root / "new/deep/c.py").stat().st_mode & 0o777 == 0o600
    assert not (root / "core/gone.py").exists()
    assert not (root / "only").exists()
    kept = sorted(p.relative_to(root / ".mqo").as_posix() for p in (root / ".mqo").rglob("*"))
    assert kept == ["manifest.json", "objects", "objects/2"]
    assert recover(root) is None


def test_a_commit_goes_through_every_step(root, monkeypatch):
    counted = steps_of(lambda: change(root), monkeypatch)
    assert tuple(counted) == COMMIT_PHASES
    assert counted["files"] == len(CHANGES)
    assert counted["records"] == len(RECORDS)


def test_a_folder_is_built_whole(root, monkeypatch):
    before = contents(root)
    assert tuple(steps_of(lambda: build(root), monkeypatch)) == BUILD_PHASES
    assert (root.parent / "runs/7/source/sub/x.py").read_text() == "whole"
    assert [path.name for path in (root.parent / "runs/7").iterdir()] == ["source"]
    assert contents(root) == before


# -- killed at any step ------------------------------------------------------------------------


def test_killed_at_any_step_a_commit_is_undone_or_finished(root, ends, monkeypatch):
    counted = steps_of(lambda: change(root), monkeypatch)
    for name, number in occurrences(counted):
        fresh(root)
        assert killed_at(name, number, lambda: change(root))
        outcome = recover(root)
        assert outcome.finished == (name not in ROLLED_BACK)
        assert outcome.command == "apply"
        assert contents(root) == ends[outcome.finished], (name, number)
        assert recover(root) is None
        assert contents(root) == ends[outcome.finished]


def test_an_exception_at_any_step_is_as_good_as_a_kill(root, ends, monkeypatch):
    def end():
        raise StoppedError

    counted = steps_of(lambda: change(root), monkeypatch)
    for name, number in occurrences(counted):
        fresh(root)
        with monkeypatch.context() as patch, pytest.raises(StoppedError):
            patch.setattr(transaction, "step", stopper(name, number, end))
            change(root)
        recover(root)
        assert contents(root) == ends[name not in ROLLED_BACK], (name, number)


def test_killed_before_any_system_call_a_commit_is_undone_or_finished(root, ends):
    finished, number = [], 1
    while events_until(number, lambda: change(root)):
        outcome = recover(root)
        state = contents(root)
        assert state in ends, number
        assert outcome is None or state == ends[outcome.finished]
        finished.append(state == ends[1])
        fresh(root)
        number += 1
    assert number > 30
    assert finished == sorted(finished)  # from one instant on it is made, and never undone again


def torn_at(number, action):
    """Kill an action when half of its file `number` (from 1) is written; whether it got there."""
    write, left = Path.write_bytes, number

    def torn(path, content):
        nonlocal left
        left -= 1
        if left == 0:
            write(path, content[: len(content) // 2])
            kill_me()
        return write(path, content)

    def run():
        Path.write_bytes = torn
        action()

    return in_child(run)


def test_a_file_of_which_half_is_written_is_no_harm(root, ends):
    number = 1
    while torn_at(number, lambda: change(root)):
        recover(root)
        assert contents(root) == ends[0], number
        number += 1
    assert number == 7  # three files, two records, the journal, and none more


def test_a_note_of_which_half_is_written_is_no_harm(root, ends):
    assert torn_at(1, lambda: build(root))
    assert recover(root).command == "snapshot"
    assert contents(root) == ends[0]
    assert not (root.parent / "runs").exists()


def test_what_was_done_behind_a_killed_commit_that_was_complete_stays(root):
    assert killed_at("done", 1, lambda: change(root))
    (root / "a.py").write_text("mine")
    (root / "core/gone.py").write_text("mine, too")
    assert recover(root).finished
    assert (root / "a.py").read_text() == "mine"
    assert (root / "core/gone.py").read_text() == "mine, too"


def test_a_recovery_may_be_killed_before_any_system_call(root, ends):
    # What is left to recover behind these is a part of it.
    for name in ("stage", "journal", "files"):
        number, reached = 1, True
        while reached:
            fresh(root)
            assert killed_at(name, 1, lambda: change(root))
            reached = events_until(number, lambda: recover(root))
            recover(root)
            assert contents(root) == ends[name not in ROLLED_BACK], (name, number)
            number += 1


def test_killed_before_any_system_call_a_folder_is_whole_or_not_there(root):
    before, number = contents(root), 1
    there, said = [], set()
    while events_until(number, lambda: build(root)):
        outcome = recover(root)
        assert contents(root) == before, number
        runs = contents(root.parent / "runs") if (root.parent / "runs").exists() else {}
        files = {path: row[0] for path, row in runs.items() if row[0] is not None}
        assert files in ({}, {"7/source/sub/x.py": b"whole", "7/source/y.py": b"whole"}), number
        assert runs == {} or files, number
        assert not [path for path in runs if "mqo-part" in path]
        if outcome and outcome.command:
            assert outcome.finished == bool(files), number
            end = "half-way; finished it first" if files else "before it changed anything"
            assert str(outcome).startswith(f"'snapshot' was killed {end}")
            said.add(end)
        there.append(bool(files))
        clear(root)
        number += 1
    assert number > 10 and len(said) == 2
    assert there == sorted(there)


def test_parents_that_hold_something_else_stay(root):
    (root.parent / "runs/7").mkdir(parents=True)
    assert killed_at("built", 1, lambda: build(root))
    recover(root)
    assert list(contents(root.parent / "runs")) == ["7"]


def test_a_failure_while_building_leaves_nothing(root):
    with (
        pytest.raises(StoppedError),
        building(root, root.parent / "new/shot", command="snapshot") as folder,
    ):
        (folder / "sub").mkdir()
        (folder / "sub").chmod(0o500)
        raise StoppedError
    assert not (root.parent / "new").exists()
    assert not transaction.is_interrupted(root)


def test_two_trees_may_build_at_one_place_and_the_second_is_refused(root, tmp_path):
    other = make(tmp_path / "other")
    target = tmp_path / "shot"
    with (
        pytest.raises(OverlayError, match="could not be written"),
        building(root, target, command="snapshot") as folder,
    ):
        (folder / "mine").write_text("")
        with building(other, target, command="snapshot") as second:
            (second / "theirs").write_text("")
    assert [path.name for path in target.iterdir()] == ["theirs"]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"tree", "other", "shot"}


# -- errors of the machine ---------------------------------------------------------------------


def fail_at(monkeypatch, owner, name, number, code):
    """Let the call `number` (from 1) of a function fail, and all behind it."""
    real, calls = getattr(owner, name), []

    def failing(*args, **kwargs):
        calls.append(name)
        if len(calls) >= number:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)


@pytest.mark.parametrize("call", ["write_bytes", "write_text", "mkdir"])
@pytest.mark.parametrize("action", [change, build])
def test_a_full_disk_changes_nothing(root, ends, monkeypatch, call, action):
    for number in range(1, 20):
        with monkeypatch.context() as patch:
            fail_at(patch, Path, call, number, errno.ENOSPC)
            try:
                action(root)
            except (OverlayError, DiskFullError) as error:
                text = str(error)
            else:
                break
        half = "stopped half-way" in text
        assert ("No space left on device" if half else " is full: ") in text
        if half:
            assert recover(root).finished
            assert contents(root) == ends[1]
        else:
            assert contents(root) == ends[0]
            assert not (root.parent / "runs").exists()
        clear(root)
    assert number < 19


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_what_cannot_be_synced_is_not_done_or_finished_later(root, ends, monkeypatch, code):
    seen = set()
    for number in range(1, 40):
        with monkeypatch.context() as patch:
            fail_at(patch, os, "fsync", number, code)
            try:
                change(root)
            except (OverlayError, DiskFullError) as error:
                half = "stopped half-way" in str(error)
            else:
                break
        outcome = recover(root)
        assert half or outcome is None
        assert contents(root) == ends[half]
        seen.add(half)
        fresh(root)
    assert seen == {False, True}
    assert number < 39


def test_a_rename_that_fails_half_way_is_made_by_the_next_command(root, ends, monkeypatch):
    half = []
    for number in range(1, 20):
        with monkeypatch.context() as patch:
            fail_at(patch, Path, "replace", number, errno.EPERM)
            try:
                change(root)
            except OverlayError as error:
                half.append("finishes the change first" in str(error))
            else:
                break
        outcome = recover(root)
        assert bool(outcome) == half[-1]
        assert contents(root) == ends[half[-1]]
        fresh(root)
    assert half == [False, *[True] * (number - 2)]
    assert number > 4


# -- what is refused before anything -----------------------------------------------------------


def refused(root, path, match, content=b"x"):
    before = contents(root)
    with pytest.raises(OverlayError, match=match):
        commit(root, [Change("a.py", b"after"), Change(path, content)], RECORDS, command="apply")
    assert contents(root) == before
    assert not transaction.is_interrupted(root)


@pytest.mark.parametrize("content", [b"x", None])
def test_a_read_only_file_is_refused(root, content):
    (root / "core/b.py").chmod(0o444)
    refused(root, "core/b.py", r"b\.py is read-only", content)


def test_a_read_only_folder_is_refused(root):
    (root / "core").chmod(0o555)
    refused(root, "core/b.py", "core is read-only")
    refused(root, "core/new/deep.py", "core is read-only")


def test_links_are_refused(root, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/x.py").write_text("theirs")
    (root / "link.py").symlink_to("a.py")
    (root / "dangling.py").symlink_to("nowhere")
    (root / "loop").symlink_to("loop")
    (root / "inside").symlink_to("core")
    (root / "outside").symlink_to(tmp_path / "elsewhere")
    for path in ("link.py", "dangling.py", "loop/x.py", "inside/b.py", "outside/x.py"):
        refused(root, path, "symbolic link")
    assert (tmp_path / "elsewhere/x.py").read_text() == "theirs"


def test_a_tree_behind_a_link_is_a_tree(root, ends, tmp_path):
    (tmp_path / "link").symlink_to(root)
    change(tmp_path / "link")
    assert contents(root) == ends[1]


@pytest.mark.parametrize("path", ["../x.py", "core/../../x.py", "/x.py", "core/../a.py"])
def test_paths_that_leave_the_tree_are_refused(root, path):
    refused(root, path, "leaves the tree")


def test_a_folder_in_a_files_place_and_a_file_in_a_folders_are_refused(root):
    refused(root, "core", "core is in the way of core;")
    refused(root, "core/b.py/x/y.py", r"b\.py is in the way of core/b\.py/x/y\.py;")
    refused(root, "a.py/x/y.py", "both be files")
    refused(root, "x" * 300, "could not be written")


# -- notes that are not as they were written ---------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda text: b"", "is damaged"),
        (lambda text: b"[]", "is damaged"),
        (lambda text: text.replace(b'"schema": 1', b'"schema": 9'), "has schema 9"),
    ],
)
@pytest.mark.parametrize("action", [change, build])
def test_a_damaged_note_is_an_error_and_nothing_is_done(root, action, damage, match):
    phase = "files" if action is change else "built"
    assert killed_at(phase, 2 if action is change else 1, lambda: action(root))
    name = "journal.json" if action is change else "incoming/building.json"
    note = root / ".mqo" / name
    note.write_bytes(damage(note.read_bytes()))
    before = contents(root.parent)
    with pytest.raises(OverlayError, match=match):
        recover(root)
    assert contents(root.parent) == before


def test_no_folder_is_removed_that_building_did_not_make(root):
    precious = root.parent / "precious"
    precious.mkdir()
    assert killed_at("built", 1, lambda: build(root))
    note = root / ".mqo/incoming/building.json"
    folder = next((root.parent / "runs/7").iterdir())
    note.write_text(note.read_text().replace(str(folder), str(precious)))
    with pytest.raises(OverlayError, match=r"is damaged .*precious"):
        recover(root)
    assert precious.exists()
