"""Notes that somebody else wrote: what `recover` may do for them, and that is little."""

import json
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mqo.errors import OverlayError
from mqo.overlay import journal, transaction, writable
from mqo.overlay.transaction import Change, building, commit, recover
from mqo.overlay.tree import Tree

from ..conftest import FILES, contents, refused

PART = ".shot.0123abcd.mqo-part"


@pytest.fixture
def root(tmp_path):
    """A tree with a file, and files beside it that are nobody's business."""
    return make(tmp_path)


def make(folder):
    root = folder / "tree"
    (root / ".mqo/incoming").mkdir(parents=True)
    (root / "a.py").write_text("a")
    (root / ".mqo/incoming/f0").write_text("staged")
    (folder / "victim").write_text("precious")
    (folder / "home/deep").mkdir(parents=True)
    (folder / "home/deep/letter").write_text("precious")
    (root / "link").symlink_to(folder / "home")
    return root


def journal_of(root, files=(), records=(), **more):
    table = {"schema": 1, "command": "apply", "files": list(files), "records": list(records)}
    (root / ".mqo/journal.json").write_text(json.dumps(table | more))


def building_of(root, target, folder, made=()):
    table = {"schema": 1, "target": str(target), "folder": str(folder), "made": [*map(str, made)]}
    (root / ".mqo/incoming/building.json").write_text(json.dumps(table))


def nothing_happens(root, match="is damaged"):
    before = contents(root.parent)
    with pytest.raises(OverlayError, match=match):
        recover(root)
    assert contents(root.parent) == before


# -- a commit's journal ------------------------------------------------------------------------

OUTSIDE = ["../victim", "{folder}/victim", "core/../../victim", "link/deep/letter", ".", ""]
OUTSIDE += ["..", "x" * 300, "nul\0", "\ud800"]


@pytest.mark.parametrize("staged", [None, "f0"])
@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("kind", ["files", "records"])
def test_a_path_outside_of_the_tree_is_refused(root, kind, path, staged):
    (root / ".mqo/link").symlink_to(root.parent / "home")
    (root / "megatron").mkdir()
    journal_of(root, **{kind: [{"path": path.format(folder=root.parent), "staged": staged}]})
    nothing_happens(root)


def test_records_stay_in_the_store(root):
    journal_of(root, records=[{"path": "../a.py", "staged": None}])
    nothing_happens(root)


@pytest.mark.parametrize("staged", ["../../../victim", "../../a.py", "/etc/passwd", "command", 3])
def test_only_staged_files_are_moved_into_the_tree(root, staged):
    journal_of(root, [{"path": "b.py", "staged": staged}])
    nothing_happens(root)


def test_a_staged_link_is_not_moved_into_the_tree(root):
    (root / ".mqo/incoming/f1").symlink_to(root.parent / "victim")
    journal_of(root, [{"path": "b.py", "staged": "f1"}])
    nothing_happens(root)


def test_a_good_path_beside_a_bad_one_is_not_touched(root):
    journal_of(root, [{"path": "a.py", "staged": "f0"}, {"path": "../victim", "staged": None}])
    nothing_happens(root)


@pytest.mark.parametrize("name", ["journal.json", "incoming/building.json"])
@pytest.mark.parametrize("what", ["folder", "link", "pipe", "deep"])
def test_a_note_that_is_no_plain_file_is_refused(root, name, what):
    note = root / ".mqo" / name
    if what == "folder":
        note.mkdir()
    elif what == "pipe":
        os.mkfifo(note)
    elif what == "deep":
        note.write_text("[" * 100_000)
    else:
        note.symlink_to(root.parent / "victim")
    with pytest.raises(OverlayError, match=r"is damaged|symbolic link|is a folder"):
        recover(root)
    assert (root / "a.py").read_text() == "a"


def test_the_status_of_a_hostile_tree_deletes_nothing(mqo, mini, tmp_path):
    (tmp_path / "victim").write_text("precious")
    (mini.tree.store / "incoming").mkdir()
    journal_of(mini.tree.root, [{"path": "../victim", "staged": None}])
    refused(mqo("status"), "journal.json is damaged", "../victim")
    assert (tmp_path / "victim").read_text() == "precious"


# -- the note of a folder that was being made --------------------------------------------------


def part(root, name=PART):
    folder = root.parent / "runs" / name
    folder.mkdir(parents=True)
    (folder / "x").write_text("half")
    (folder / "out").symlink_to(root.parent / "home")
    return folder


NAMES = ["precious", "shot", ".shot.mqo-part", ".mqo-part", ".other.0123abcd.mqo-part"]
NAMES += [".shot.0123ABCD.mqo-part", ".shot.0123abcde.mqo-part", "my.0123abcd.mqo-part"]


@pytest.mark.parametrize("name", NAMES)
def test_no_folder_is_removed_that_has_another_name(root, name):
    folder = part(root, name)
    building_of(root, folder.with_name("shot"), folder)
    nothing_happens(root)


def test_no_folder_is_removed_elsewhere_than_beside_its_target(root):
    folder = part(root)
    building_of(root, root.parent / "elsewhere/shot", folder)
    nothing_happens(root)


def test_no_folder_is_removed_that_is_a_link_a_file_or_somebody_elses(root, monkeypatch):
    target, folder = root.parent / "shot", root.parent / PART
    folder.symlink_to(root.parent / "home")
    building_of(root, target, folder)
    nothing_happens(root)
    folder.unlink()
    folder.write_text("a file")
    nothing_happens(root)
    folder.unlink()
    folder.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    nothing_happens(root)


def test_no_folder_is_removed_but_empty_ones_that_the_target_lies_in(root):
    folder = part(root)
    target, other = folder.with_name("shot"), root.parent / "empty"
    other.mkdir()
    building_of(root, target, folder, [other])
    nothing_happens(root)
    building_of(root, target, folder, [root.parent, folder.parent])
    assert not recover(root).finished
    assert not folder.parent.exists()
    assert (root.parent / "victim").exists()
    assert (root.parent / "home/deep/letter").read_text() == "precious"


@pytest.mark.parametrize("place", ["runs/shot", "../runs/shot", ""])
def test_a_relative_place_is_refused(root, place):
    building_of(root, place, Path(place).parent / PART)
    nothing_happens(root)


# -- links in .mqo -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", *writable.LOCK_FILES, "incoming"])
def test_what_a_link_in_the_store_leads_to_stays(root, name):
    (root.parent / "home/incoming").mkdir()
    place = root / ".mqo" / name
    if place.is_dir():
        shutil.rmtree(place)
    victim = "home" if name in ("", "incoming") else "victim"
    place.symlink_to(root.parent / victim)
    before = contents(root.parent)
    with pytest.raises(OverlayError, match="symbolic link"), Tree(root).locked("look"):
        pass
    assert contents(root.parent) == before


def test_no_record_is_written_through_a_link(root):
    shutil.rmtree(root / ".mqo/incoming")
    (root / ".mqo/objects").symlink_to(root.parent / "home")
    before = contents(root.parent)
    with pytest.raises(OverlayError, match=r"\.mqo.* symbolic link"):
        commit(root, [Change("a.py", b"b")], {"objects/1": b"1"}, command="apply")
    assert contents(root.parent) == before


# -- the way out -------------------------------------------------------------------------------


def test_the_help_for_a_damaged_journal_keeps_the_originals(mqo, patched):
    (patched.tree.store / "incoming").mkdir()
    note = patched.tree.store / "journal.json"
    note.write_text("{")
    patched.path("core/layers.py").write_bytes(b"half\n")  # as the command had written it
    said = mqo("status")
    refused(said, "journal.json is damaged", "mqo restore --force")
    assert "mqo vendor" not in said[2]
    note.unlink()
    (patched.tree.store / "incoming").rmdir()
    assert "+half" in mqo("diff")[1]
    assert mqo("restore", "--force")[0] == 0
    assert patched.bytes() == FILES


def test_notes_come_back_as_they_were_written(root):
    made = journal.start_building(root.parent / "new/deep/shot")
    assert made.made == (root.parent / "new/deep", root.parent / "new")
    (root / "note").write_bytes(journal.as_json(made))
    assert journal.read_building(root / "note") == made
    moves = (journal.Move("a.py", "f0"), journal.Move("gone.py", None))
    whole = journal.Journal("apply", moves, (journal.Move("objects/1", "r0"),))
    (root / ".mqo/note").write_bytes(journal.as_json(whole))
    assert journal.read_journal(root / ".mqo/note", root) == whole


# -- any note ----------------------------------------------------------------------------------

PATHS = st.one_of(
    st.sampled_from([*OUTSIDE, "a.py", "core/b.py", "link", ".mqo/lock", "a.py/x", "/", "~/x"]),
    st.lists(st.sampled_from(["..", ".", "link", "a.py", "victim", "home", "tree", ".mqo"])).map(
        "/".join
    ),
    st.text(max_size=8),
)
STAGED = st.one_of(st.none(), st.sampled_from(["f0", "f1", "../../a.py"]), PATHS, st.integers())
MOVES = st.lists(st.fixed_dictionaries({"path": PATHS, "staged": STAGED}), max_size=3)
SPOTS = ["shot", PART, "home", "home/shot", f"home/{PART}", "tree", f"link/{PART}", "victim", ""]
PLACES = st.one_of(st.sampled_from([f"{{folder}}/{spot}" for spot in SPOTS]), PATHS)
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | PATHS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
JOURNALS = st.fixed_dictionaries(
    {"schema": st.just(1), "command": st.just("apply") | ANY, "files": MOVES | ANY},
    optional={"records": MOVES | ANY, "more": ANY},
)
NOTES = st.fixed_dictionaries(
    {"schema": st.just(1), "target": PLACES | ANY, "folder": PLACES | ANY},
    optional={"made": st.lists(PLACES, max_size=3) | ANY},
)


def formatted(value, folder):
    """`value` with {folder} filled in, wherever it stands."""
    match value:
        case str():
            return value.replace("{folder}", str(folder))
        case list():
            return [formatted(one, folder) for one in value]
        case dict():
            return {key: formatted(one, folder) for key, one in value.items()}
    return value


def outside(folder):
    """What must stay: all but the tree, and unfinished folders of ours."""
    return {
        path: row
        for path, row in contents(folder).items()
        if path.split("/")[0] != "tree" and PART not in path
    }


def try_notes(table, note):
    folder = Path(tempfile.mkdtemp(prefix="mqo-notes-"))
    try:
        root = make(folder)
        for place in (folder, folder / "home"):
            (place / PART).mkdir()
            (place / PART / "half").write_text("half")
        for name, value in (("journal.json", table), ("incoming/building.json", note)):
            if value is not None:
                text = json.dumps(formatted(value, folder), ensure_ascii=True)
                (root / ".mqo" / name).write_text(text)
        before = outside(folder)
        try:
            recover(root)
        except OverlayError as error:
            assert "Traceback" not in str(error)
        assert outside(folder) == before
        assert stat.S_ISDIR(folder.stat().st_mode)
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize("examples", [50, pytest.param(2000, marks=pytest.mark.heavy)])
def test_no_note_changes_what_lies_outside_of_the_tree(examples):
    health = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    some = settings(max_examples=examples, suppress_health_check=health, database=None)
    some(given(JOURNALS | ANY | st.none(), NOTES | ANY)(try_notes))()


def test_the_fuzzed_notes_are_not_all_refused(root):
    """What the strategies above are made of can be carried out, too."""
    part_folder = root.parent / PART
    part_folder.mkdir()
    note = {"schema": 1, "target": "{folder}/shot", "folder": f"{{folder}}/{PART}", "made": []}
    place = root / ".mqo/incoming/building.json"
    place.write_text(json.dumps(formatted(note, root.parent)))
    assert not recover(root).finished
    assert not part_folder.exists()


def test_a_folder_is_still_built(root):
    shutil.rmtree(root / ".mqo/incoming")
    with building(root, root.parent / "new/shot", command="snapshot") as folder:
        (folder / "x").write_text("x")
        (note,) = (root / ".mqo/incoming").glob("building.json")
        assert journal.read_building(note).folder == folder
    assert (root.parent / "new/shot/x").exists()
    assert not transaction.is_interrupted(root)
