import json

import pytest
from mqo.errors import OverlayError
from mqo.overlay import records
from mqo.overlay.records import AppliedEntry, Manifest, PatchedFile, Upstream

MANIFEST = Manifest(
    "1.2.3",
    (AppliedEntry("a", "site", "d1"), AppliedEntry("b", "codemod", "d2")),
    {
        "y.py": PatchedFile("p", (("a", "1"), ("b", "2")), 0o644),
        "x.py": PatchedFile(None, (("b", "3"),), 0o755),
    },
)


def read_manifest(path):
    return records.read(path, Manifest.from_table)


def test_the_records_come_back_as_they_were_written(tmp_path):
    upstream = Upstream("1.2.3", "somewhere", "3.11", {"x.py": "ab"})
    (tmp_path / "u").write_bytes(records.as_json(upstream))
    (tmp_path / "m").write_bytes(records.as_json(MANIFEST))
    assert records.read(tmp_path / "u", lambda table: Upstream(**table)) == upstream
    assert read_manifest(tmp_path / "m") == MANIFEST


def test_no_file_is_no_record(tmp_path):
    assert read_manifest(tmp_path / "m") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"schema": 2}',
        '{"schema": 2, "version": "1", "entries": [{}], "files": {}}',
        '{"schema": 2, "version": "1", "entries": [], "files": {"x": 1}}',
    ],
)
def test_a_damaged_manifest_is_named_and_not_used(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(OverlayError, match=r"manifest\.json is damaged.*mqo vendor --force"):
        read_manifest(tmp_path / "manifest.json")


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.9, 0.99])
def test_a_manifest_cut_short_is_damaged(tmp_path, cut):
    whole = records.as_json(MANIFEST)
    (tmp_path / "manifest.json").write_bytes(whole[: int(len(whole) * cut)])
    with pytest.raises(OverlayError, match="is damaged"):
        read_manifest(tmp_path / "manifest.json")


def test_a_record_of_a_newer_schema_is_named_as_such(tmp_path):
    (tmp_path / "m").write_text(json.dumps({"schema": 99, "anything": "else"}))
    with pytest.raises(OverlayError, match=r"schema 99.*Expected: schema 2"):
        read_manifest(tmp_path / "m")


def test_the_files_of_an_entry_are_listed_sorted():
    assert MANIFEST.touched_by("b") == ["x.py", "y.py"]
    assert MANIFEST.touched_by("a") == ["y.py"]
