import os

import pytest
from mqo.errors import OverlayError
from mqo.overlay import tree as module
from mqo.overlay.records import PatchedFile
from mqo.overlay.tree import Tree, sha256

from ..conftest import store


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def test_a_tree_without_records_says_how_to_get_them(tree):
    with pytest.raises(OverlayError, match="`mqo vendor`"):
        tree.upstream()
    assert tree.manifest() is None


def test_an_unpatched_tree_says_how_to_patch_it(mini):
    with pytest.raises(OverlayError) as caught:
        mini.tree.patched()
    assert str(caught.value) == (
        f"{mini.tree.root} is not patched. Expected: a tree with the patch series applied. "
        "Run `mqo apply`."
    )


# -- objects -----------------------------------------------------------------------------------


def test_an_object_comes_back_by_its_hash(tree):
    assert tree.object(store(tree, b"content")) == b"content"
    assert tree.new_objects([b"content", b"more"]) == {f"objects/{sha256(b'more')}": b"more"}


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_missing_or_damaged_object_is_an_error(tree, damage):
    path = tree.store / "objects" / store(tree, b"content")
    path.unlink() if damage == "gone" else path.write_bytes(b"other")
    with pytest.raises(OverlayError, match="is missing or damaged"):
        tree.object(path.name)
    assert tree.new_objects([b"content"]) == {f"objects/{path.name}": b"content"}  # it is replaced


def test_objects_that_nothing_refers_to_are_named(tree):
    kept, other = store(tree, b"content"), store(tree, b"other")
    assert tree.unused_objects({kept, "elsewhere"}) == {f"objects/{other}": None}


# -- states ------------------------------------------------------------------------------------

LITERAL = b"custom_quant_type = 'none'\n"


@pytest.mark.parametrize(
    ("content", "state"),
    [
        (b"before\n", "pristine"),
        (LITERAL, "patched"),
        (LITERAL.replace(b"none", b"mxfp8"), "patched"),
        (b"once " + LITERAL, "edited"),
        (LITERAL + b"# mine\n", "edited"),
        (b"", "edited"),
        (None, "missing"),
    ],
)
def test_the_state_of_a_patched_file_follows_its_bytes(tree, content, state):
    file = PatchedFile(sha256(b"before\n"), (("a", sha256(LITERAL)),), 0o644)
    if content is not None:
        (tree.root / "x.py").write_bytes(content)
    assert tree.state_of("x.py", file) == state


def test_changed_and_deleted_files_are_edits_and_added_ones_are_not(patched):
    patched.edit("core/layers.py", b"A linear", b"My linear")
    patched.edit("core/plain.py", b"42", b"43")
    patched.path("core/table.bin").unlink()
    patched.path("core/new.py").write_text("mine\n")
    assert patched.tree.edited_files() == [
        "megatron/core/layers.py",
        "megatron/core/plain.py",
        "megatron/core/table.bin",
    ]


# -- the lock ----------------------------------------------------------------------------------


def test_a_held_lock_is_an_error_that_names_the_holder(tree, monkeypatch):
    monkeypatch.setattr(module, "LOCK_WAIT_S", 0)
    in_use = pytest.raises(OverlayError, match=f"process {os.getpid()} .mqo apply.")
    with tree.locked("apply"), in_use, Tree(tree.root).locked("apply"):
        pass


def test_who_waits_long_is_told_for_whom_once(tree, monkeypatch, caplog):
    holder = tree.locked("apply")
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            holder.__exit__(None, None, None)

    monkeypatch.setattr(module, "LOCK_NOTE_S", 0)
    monkeypatch.setattr(module.time, "sleep", nap)
    holder.__enter__()
    with Tree(tree.root).locked("restore"):
        pass
    (told,) = caplog.messages
    assert f"waiting for process {os.getpid()} (mqo apply)" in told
    assert len(naps) == 3


def test_the_lock_is_free_again_after_a_failure(tree, monkeypatch):
    monkeypatch.setattr(module, "LOCK_WAIT_S", 0)
    with pytest.raises(ZeroDivisionError), tree.locked("apply"):
        raise ZeroDivisionError
    with tree.locked("apply"):
        pass
