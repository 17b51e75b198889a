"""What is wrong with the input or the machine, through the command line: one paragraph, exit code
2, and nothing changed. (What a wheel may hold is tested in test_vendor, too.)
"""

import errno
import json
import os
import zipfile
from pathlib import Path

import pytest
from mqo.overlay import transaction
from mqo.overlay.apply import apply

from ..conftest import FILES, contents, materialize, refused
from .conftest import WHEEL, pin_text, wheel

LAYERS, GADGET = "megatron/core/layers.py", "megatron/core/gadget.py"
WRITING = ("apply", "restore")
PATCHED = (["apply"], ["restore"], ["status"], ["diff"], ["snapshot", "{new}"])


@pytest.fixture
def unchanged(mini):
    """Everything below the project's folder, which must be as it was when the test ends."""
    before = []

    def remember():
        before[:] = [contents(mini.patches.parent)]

    yield remember
    assert before == [contents(mini.patches.parent)]
    assert not transaction.is_interrupted(mini.tree.root)


@pytest.fixture
def vendor(mqo, mini):
    """A function that vendors from a wheel of these bytes, which is trusted, or from a folder."""
    folder = mini.patches.parent

    def run(source, *words):
        place = source
        if isinstance(source, bytes):
            place = folder / WHEEL
            place.write_bytes(source)
            (folder / "Megatron-LM").mkdir(exist_ok=True)
            (folder / "Megatron-LM/UPSTREAM.toml").write_text(pin_text({WHEEL: source}))
        before = contents(mini.tree.root)
        outcome = mqo("vendor", "--from", place, *words)
        assert outcome[0] == 0 or contents(mini.tree.root) == before
        return outcome

    return run


# -- wheels and checkouts ----------------------------------------------------------------------


def link():
    info = zipfile.ZipInfo("megatron/core/link.py")
    info.external_attr = 0o120777 << 16
    return info


@pytest.mark.parametrize(
    "member", ["../x.py", "/tmp/x.py", "megatron/core/../../../x.py", "megatron\\x.py", link()]
)
def test_a_member_that_leaves_its_folder(vendor, tmp_path, member):
    refused(vendor(wheel(FILES, extra=[(member, b"x = 1\n")])), "holds the member")
    assert not [path for path in (tmp_path / "x.py", tmp_path.parent / "x.py") if path.exists()]


def with_byte(content, offset, value):
    """A wheel with a byte changed in the header of each member, `offset` bytes into the name's."""
    for mark, at in ((b"PK\x03\x04", offset), (b"PK\x01\x02", offset + 2)):
        start = content.find(mark)
        while start >= 0:
            content = content[: start + at] + value + content[start + at + 1 :]
            start = content.find(mark, start + 1)
    return content


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (with_byte(wheel(FILES), 6, b"\x01"), "is damaged"),
        (with_byte(wheel(FILES), 8, b"\x63"), "is damaged"),
        (b"<html>not found</html>", "is damaged"),
        (wheel(FILES).replace(b"RECORDmegatron", b"RECORD\xff\xfegatron"), "is damaged"),
        (wheel(FILES)[:-30], "is damaged"),
        (wheel(FILES)[:500], "is damaged"),
        (wheel({**FILES, "megatron/core/a": b"", "megatron/core/a/b": b""}), "both be files"),
        (wheel({**FILES, "megatron/core/" + "x" * 300: b""}), "File name too long"),
        (wheel({**FILES, "megatron/core/package_info.py": b"MAJOR = (\n"}), "not Python"),
        (wheel({**FILES, "megatron/core/package_info.py": b"\xff"}), "not Python"),
    ],
    ids=[
        *("encrypted", "method", "no zip", "record", "cut", "cut early", "clash", "long"),
        *("no Python", "no UTF-8"),
    ],
)
def test_a_wheel_that_cannot_be_used(vendor, content, part):
    refused(vendor(content, "--force"), part)


def test_a_checkout_whose_version_cannot_be_read(vendor, mini, tmp_path):
    vendor(wheel(FILES), "--force")
    source = tmp_path / "checkout"
    materialize(source, {**FILES, "megatron/core/package_info.py": b"MAJOR = \n"})
    refused(vendor(source), "not Python")


def test_links_of_a_checkout_are_not_followed(vendor, mini, tmp_path):
    vendor(wheel(FILES), "--force")
    source = tmp_path / "checkout"
    materialize(source, FILES)
    (tmp_path / "secret").write_text("secret = 1\n")
    (source / "megatron/core/link.py").symlink_to(tmp_path / "secret")
    (source / "megatron/core/folder").symlink_to(tmp_path)
    assert vendor(source)[0] == 0
    assert mini.bytes() == FILES
    assert not mini.path("core/link.py").exists()
    assert not mini.path("core/folder").exists()


# -- sources that are no Python ----------------------------------------------------------------


@pytest.mark.parametrize("path", [LAYERS, GADGET])
@pytest.mark.parametrize(
    "tail",
    [b"old_engine = (\n", b"old_engine = '\xff'\n", b"old_engine = '\x00'\n"],
    ids=["syntax", "no UTF-8", "null"],
)
def test_upstreams_source_does_not_parse(mqo, mini, unchanged, path, tail):
    materialize(mini.tree.root, {**FILES, path: FILES[path] + b"\n" + tail})
    unchanged()
    refused(mqo("apply"), path, "does not parse")


@pytest.fixture
def broken(patched):
    """A patched tree whose quant sites stand in a file that an editor left broken."""
    patched.path("core/layers.py").write_bytes(patched.tree.read(LAYERS) + b"\ndef f(:\n")
    return patched


@pytest.mark.parametrize("words", [["apply"], ["restore"], ["snapshot", "{new}"]])
def test_a_patched_file_that_an_edit_broke(mqo, broken, unchanged, tmp_path, words):
    unchanged()
    said = mqo(*(word.format(new=tmp_path / "shot") for word in words))
    refused(said, *(["does not parse"] if words[0] == "snapshot" else [LAYERS, "--force"]))


def test_a_broken_file_is_shown_and_can_be_overwritten(mqo, broken):
    code, out, err = mqo("status")
    assert (code, err) == (1, "")
    assert f"changed by hand: {LAYERS}" in out
    assert "+def f(:" in mqo("diff")[1]
    assert mqo("restore", "--force")[0] == 0
    assert broken.bytes() == FILES


# -- trees that cannot be written --------------------------------------------------------------


def patch_first(mini, command):
    if command == "restore":
        apply(mini.tree, mini.series)


@pytest.mark.parametrize("command", WRITING)
@pytest.mark.parametrize("where", ["file", "folder", "everything"])
def test_a_read_only_tree(mqo, mini, unchanged, command, where):
    patch_first(mini, command)
    paths = {
        "file": [mini.path("core/gadget.py")],
        "folder": [mini.path("core")],
        "everything": [mini.tree.root, *mini.tree.root.rglob("*")],
    }[where]
    for path in paths:
        path.chmod(path.stat().st_mode & ~0o222)
    unchanged()
    refused(mqo(command), "read-only" if os.getuid() == 0 else "")


def test_a_runs_own_source_is_not_patched(mqo, patched, tmp_path, unchanged):
    assert mqo("snapshot", tmp_path / "shot")[0] == 0
    unchanged()
    refused(mqo("apply", tree=tmp_path / "shot"), "holds no vendored Megatron")


@pytest.mark.parametrize("command", WRITING)
@pytest.mark.parametrize("what", ["file", "dangling", "folder", "inner folder"])
def test_links_in_the_tree(mqo, mini, unchanged, tmp_path, command, what):
    patch_first(mini, command)
    path = mini.path("core/layers.py")
    if "folder" in what:
        path = path.parent
    place = mini.path("moved") if what == "inner folder" else tmp_path / "elsewhere"
    if what == "dangling":
        path.unlink()
    else:
        path.rename(place)
    path.symlink_to(place)
    unchanged()
    # A link to nothing is a file that is gone; with --force, too, it is not written through.
    refused(mqo(command), "changed by hand" if what == "dangling" else "symbolic link")
    refused(mqo(command, "--force"), "symbolic link")


@pytest.mark.parametrize("command", [*WRITING, "status"])
def test_a_folder_in_a_files_place(mqo, mini, unchanged, command):
    patch_first(mini, command)
    mini.path("core/layers.py").unlink()
    mini.path("core/layers.py").mkdir()
    unchanged()
    refused(mqo(command), "layers.py is a folder")


@pytest.mark.parametrize("command", WRITING)
def test_a_file_in_a_folders_place(mqo, mini, unchanged, tmp_path, command):
    patch_first(mini, command)
    mini.path("core").rename(tmp_path / "away")
    mini.path("core").write_text("a file\n")
    unchanged()
    refused(mqo(command), "changed by hand")
    refused(mqo(command, "--force"), "in the way of")


def test_a_snapshot_below_a_file(mqo, patched, unchanged, tmp_path):
    (tmp_path / "file").write_text("")
    unchanged()
    refused(mqo("snapshot", tmp_path / "file/shot"), "could not be written")


# -- a full disk -------------------------------------------------------------------------------


def full(monkeypatch, after):
    """From that many writes on, the disk is full."""
    write_bytes, write_text, fsync = Path.write_bytes, Path.write_text, os.fsync
    left = [after]

    def unless_full(real):
        def write(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **options)

        return write

    monkeypatch.setattr(Path, "write_bytes", unless_full(write_bytes))
    monkeypatch.setattr(Path, "write_text", unless_full(write_text))
    monkeypatch.setattr(os, "fsync", unless_full(fsync))


COMMANDS = {
    "apply": ["apply"],
    "apply --force": ["apply", "--force"],
    "restore": ["restore"],
    "vendor": ["vendor", "--force", "--from", "{wheel}"],
    "snapshot": ["snapshot", "{folder}/runs/shot"],
    "diff --export": ["diff", "--export", "{outside}/new/patches"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk(mqo, mini, vendor, monkeypatch, tmp_path_factory, command):
    folder, outside = mini.patches.parent, tmp_path_factory.mktemp("outside")
    vendor(wheel(FILES), "--force")
    if command not in ("apply", "vendor"):
        apply(mini.tree, mini.series)
    if command == "apply --force":
        mini.edit("core/layers.py", b"A linear", b"My linear")
    places = {"wheel": folder / WHEEL, "folder": folder, "outside": outside}
    words = [word.format(**places) for word in COMMANDS[command]]
    if command == "vendor":
        mini.path("core/plain.py").unlink()
    before, number = (contents(folder), contents(outside)), 0
    while True:
        with monkeypatch.context() as patch:
            full(patch, number)
            outcome = mqo(*words)
        if outcome[0] == 0:
            break
        if "stopped half-way" in outcome[2]:
            refused(outcome, "No space left on device")
            # Behind the journal nothing but the last sync may fail for want of room.
            assert "finishes the change first" in outcome[2]
            break
        refused(outcome, "The disk of ", " is full: ", "bytes are free")
        assert (contents(folder), contents(outside)) == before
        number += 1
    assert number > 5


# -- records -----------------------------------------------------------------------------------


DAMAGES = ("empty", "almost", "list", "newer", "folder", "deep")


@pytest.mark.parametrize(
    ("damage", "words"),
    [*(("half", words) for words in PATCHED), *((damage, ["status"]) for damage in DAMAGES)],
    ids=lambda part: part if isinstance(part, str) else part[0],
)
@pytest.mark.parametrize("name", ["manifest.json", "upstream.json"])
def test_a_record_that_is_not_as_it_was_written(
    mqo, patched, unchanged, tmp_path, name, damage, words
):
    record = patched.tree.store / name
    whole = record.read_bytes()
    match damage:
        case "empty" | "half" | "almost":
            part = {"empty": 0, "half": 0.5, "almost": 0.999}[damage]
            record.write_bytes(whole[: int(len(whole) * part)])
        case "list":
            record.write_text("[]")
        case "deep":
            record.write_text("[" * 100_000)
        case "newer":
            record.write_text(json.dumps({**json.loads(whole), "schema": 99, "more": 1}))
        case "folder":
            record.unlink()
            record.mkdir()
    unchanged()
    said = mqo(*(word.format(new=tmp_path / "shot") for word in words))
    refused(said, name, "has schema 99" if damage == "newer" else "is damaged")


@pytest.mark.parametrize(
    "path", ["../outside.py", "{folder}/outside.py", "megatron/../../outside.py"]
)
def test_a_manifest_that_names_a_file_outside_of_the_tree(mqo, patched, unchanged, tmp_path, path):
    (tmp_path / "outside.py").write_text("precious\n")
    record = patched.tree.store / "manifest.json"
    table = json.loads(record.read_bytes())
    path = path.format(folder=tmp_path)
    table["files"][path] = {**table["files"][LAYERS], "pristine": None}
    record.write_text(json.dumps(table))
    unchanged()
    for words in (["restore"], ["restore", "--force"], ["apply"], ["apply", "--force"]):
        assert mqo(*words)[0] == 2


@pytest.mark.parametrize("words", PATCHED, ids=lambda words: words[0])
def test_a_journal_cut_short(mqo, patched, tmp_path, words):
    (patched.tree.store / "journal.json").write_text('{"schema": 1, "comm')
    before = contents(tmp_path)
    said = mqo(*(word.format(new=tmp_path / "shot") for word in words))
    refused(said, "journal.json is damaged")
    assert contents(tmp_path) == before


def test_vendoring_afresh_replaces_a_damaged_object(mqo, patched, vendor):
    digest = patched.tree.manifest().files[LAYERS].pristine
    (patched.tree.store / "objects" / digest).write_bytes(b"damaged")
    before = contents(patched.tree.root)
    refused(mqo("restore"), "is missing or damaged", "mqo vendor --force")
    assert contents(patched.tree.root) == before
    assert vendor(wheel(FILES), "--force")[0] == 0
    assert mqo("apply")[0] == mqo("restore")[0] == 0
    assert patched.bytes() == FILES
