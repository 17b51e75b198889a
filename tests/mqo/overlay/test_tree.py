import json
import os

import pytest
from mqo.errors import OverlayError
from mqo.overlay import tree as module
from mqo.overlay.tree import (
    AppliedEntry,
    Manifest,
    PatchedFile,
    Tree,
    Upstream,
    sha256,
    write_file,
)

MANIFEST = Manifest(
    "1.2.3",
    (AppliedEntry("a", "site", "d1"), AppliedEntry("b", "sweep", "d2")),
    {
        "y.py": PatchedFile("p", (("a", "1"), ("b", "2"))),
        "x.py": PatchedFile("p", (("b", "3"),), earlier=("4", "5")),
    },
)


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def record(tree, name, text):
    write_file(tree.store / name, text.encode())


def test_the_records_come_back_as_they_were_written(tree):
    upstream = Upstream("1.2.3", "somewhere", "3.11", {"x.py": "ab"})
    tree.write_upstream(upstream)
    tree.write_manifest(MANIFEST)
    assert tree.upstream() == upstream
    assert tree.manifest() == MANIFEST


def test_a_tree_without_records_says_how_to_get_them(tree):
    with pytest.raises(OverlayError, match="Run `mqo vendor`"):
        tree.upstream()
    assert tree.manifest() is None


def test_an_unpatched_tree_says_how_to_patch_it(mini):
    with pytest.raises(OverlayError, match=r"is not patched.*Run `mqo apply`"):
        mini.tree.patched()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"schema": 1}',
        '{"schema": 1, "version": "1", "entries": [{}], "files": {}}',
        '{"schema": 1, "version": "1", "entries": [], "files": {"x": 1}}',
    ],
)
def test_a_damaged_manifest_is_named_and_not_used(tree, text):
    record(tree, "manifest.json", text)
    with pytest.raises(OverlayError, match=r"manifest\.json is damaged.*mqo vendor --force"):
        tree.manifest()


def test_a_record_of_a_newer_schema_is_named_as_such(tree):
    record(tree, "manifest.json", json.dumps({"schema": 2, "anything": "else"}))
    with pytest.raises(OverlayError, match=r"has schema 2.*Expected: schema 1"):
        tree.manifest()


def test_the_files_of_an_entry_are_listed_sorted():
    assert MANIFEST.touched_by("b") == ["x.py", "y.py"]
    assert MANIFEST.touched_by("a") == ["y.py"]


# -- objects -----------------------------------------------------------------------------------


def test_an_object_comes_back_by_its_hash(tree):
    assert tree.object(tree.keep(b"content")) == b"content"


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_missing_or_damaged_object_is_an_error(tree, damage):
    path = tree.store / "objects" / tree.keep(b"content")
    path.unlink() if damage == "gone" else path.write_bytes(b"other")
    with pytest.raises(OverlayError, match="is missing or damaged"):
        tree.object(path.name)


# -- states ------------------------------------------------------------------------------------

LITERAL = b"custom_quant_type = 'none'\n"


@pytest.mark.parametrize(
    ("content", "state"),
    [
        (b"before\n", "pristine"),
        (LITERAL, "patched"),
        (LITERAL.replace(b"none", b"mxfp8"), "patched"),
        (b"once " + LITERAL, "edited"),
        (b"former\n", "superseded"),
        (LITERAL + b"# mine\n", "edited"),
        (b"", "edited"),
        (None, "missing"),
    ],
)
def test_the_state_of_a_patched_file_follows_its_bytes(tree, content, state):
    file = PatchedFile(sha256(b"before\n"), (("a", sha256(LITERAL)),), (sha256(b"former\n"),))
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
    in_use = pytest.raises(OverlayError, match=f"in use by process {os.getpid()}")
    with tree.locked(), in_use, Tree(tree.root).locked():
        pass


def test_the_lock_is_free_again_after_a_failure(tree, monkeypatch):
    monkeypatch.setattr(module, "LOCK_WAIT_S", 0)
    with pytest.raises(ZeroDivisionError), tree.locked():
        raise ZeroDivisionError
    with tree.locked():
        pass


# -- writing -----------------------------------------------------------------------------------


def test_a_written_file_keeps_its_mode_and_leaves_no_part_behind(tmp_path):
    path = tmp_path / "x.sh"
    path.write_text("old")
    path.chmod(0o751)
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o751
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "x.py"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_file(path, b"new")
    assert path.read_text() == "old"
