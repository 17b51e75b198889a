"""A tree that its reader may not write: it is read, and not a byte of it changes."""

import fcntl
import os
import threading

import pytest
from mqo.errors import OverlayError
from mqo.overlay import tree as trees
from mqo.overlay.apply import AlreadyApplied, apply
from mqo.overlay.patch_files import export
from mqo.overlay.snapshot import snapshot

from ..conftest import contents


@pytest.fixture
def read_only(patched, monkeypatch):
    """The small patched tree; the tests' user may be root, who may write anything."""
    may = os.access
    root = patched.tree.root

    def access(path, mode, **rest):
        ours = root == path or root in path.parents
        return may(path, mode, **rest) and not (ours and mode == os.W_OK)

    monkeypatch.setattr(os, "access", access)
    before = everything(root)
    yield patched
    assert everything(root) == before


def everything(root):
    """All that is there, the lock's files and the times of last change included."""
    return contents(root), {path: path.stat().st_mtime_ns for path in root.rglob("*")}


def test_patches_that_are_current_are_taken_as_they_are(read_only):
    assert isinstance(apply(read_only.tree, read_only.series), AlreadyApplied)


def test_a_snapshot_is_made_elsewhere_and_leaves_nothing_beside(read_only, tmp_path):
    target = tmp_path / "runs" / "source"
    shot = snapshot(read_only.tree, target, types={"fprop": "mxfp8"})
    assert dict(shot.types) == {"fprop": "mxfp8", "dgrad": "none"}
    assert [path.name for path in target.parent.iterdir()] == ["source"]


def test_a_snapshot_that_fails_leaves_nothing(read_only, tmp_path):
    with pytest.raises(OverlayError):
        target, series = tmp_path / "runs" / "source", read_only.series
        types = {"fprop": "mxfp8"}
        snapshot(read_only.tree, target, types=types, without=("quant_sites",), series=series)
    assert not (tmp_path / "runs").exists()


def test_a_diff_is_exported(read_only, tmp_path):
    assert export(
        read_only.tree, read_only.series, (), tmp_path / "out", repository=read_only.patches
    )


def test_it_is_not_read_while_its_owner_changes_it(read_only, monkeypatch):
    monkeypatch.setattr(trees, "LOCK_WAIT_S", 0)
    with (read_only.tree.store / "lock").open("rb") as owners:
        fcntl.flock(owners, fcntl.LOCK_EX)
        with pytest.raises(OverlayError, match="in use"):
            apply(read_only.tree, read_only.series)


def test_its_reader_waits_for_the_owner(read_only, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(trees.time, "sleep", lambda seconds: released.set())
    with (read_only.tree.store / "lock").open("rb") as owners:
        fcntl.flock(owners, fcntl.LOCK_EX)
        waiter = threading.Thread(
            target=lambda: released.wait() and fcntl.flock(owners, fcntl.LOCK_UN)
        )
        waiter.start()
        assert isinstance(apply(read_only.tree, read_only.series), AlreadyApplied)
        waiter.join()


def test_many_read_it_at_once(read_only):
    with read_only.tree.reading("one"), read_only.tree.reading("two"):
        pass


def test_what_a_killed_command_left_there_is_its_owners_to_clear(patched, monkeypatch):
    (patched.tree.store / "incoming").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(OverlayError, match="`mqo status`"):
        patched.tree.settle()
