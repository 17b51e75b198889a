import json

import pytest
from mqo.errors import EditedError, OverlayError
from mqo.overlay import records
from mqo.overlay.quant_types import ledger
from mqo.overlay.records import Modified
from mqo.overlay.tree import Tree, sha256

from ...conftest import store
from .lookalike import ATTENTION, attention

BEFORE = attention().encode()
AFTER = BEFORE.replace(b"bf16", b"mxfp8")
ROW = ledger.row(ATTENTION, BEFORE, AFTER)


@pytest.fixture
def tree(tmp_path):
    (tmp_path / ".mqo").mkdir()
    return Tree(tmp_path)


def record(tree, text):
    (tree.store / records.LITERALS).write_text(text)


def test_a_row_holds_hashes_and_types(tree):
    assert (
        Modified(
            sha256(BEFORE),
            sha256(AFTER),
            {"qk": "mxfp4", "pv": "bf16"},
            {"qk": "mxfp4", "pv": "mxfp8"},
        )
        == ROW
    )


def test_the_record_comes_back_as_it_was_written(tree):
    record(tree, records.modified_as_json({ATTENTION: ROW}).decode())
    assert tree.modified() == {ATTENTION: ROW}


def test_no_record_is_nothing_modified(tree):
    assert tree.modified() == {}
    assert records.modified_as_json({}) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 2}'])
def test_a_damaged_record_is_named_and_the_way_out_said(tree, text):
    record(tree, text)
    with pytest.raises(OverlayError, match=r"literals\.json is damaged.*Delete .*literals\.json"):
        tree.modified()


def test_a_row_of_other_fields_is_damage(tree):
    record(tree, json.dumps({"schema": 2, "files": {"x": {"original": "1"}}}))
    with pytest.raises(OverlayError, match="is damaged"):
        tree.modified()


def test_a_record_of_another_schema_is_named_as_such(tree):
    record(tree, json.dumps({"schema": 9, "files": {}}))
    with pytest.raises(OverlayError, match=r"schema 9.*Expected: .*schema 2"):
        tree.modified()


def test_the_original_of_what_was_written_is_the_stored_one(tree):
    store(tree, BEFORE)
    assert ledger.original(tree, ATTENTION, AFTER, ROW) == BEFORE


def test_what_was_never_modified_or_is_itself_again_is_its_own_original(tree):
    assert ledger.original(tree, ATTENTION, AFTER, None) == AFTER
    assert ledger.original(tree, ATTENTION, BEFORE, ROW) == BEFORE


@pytest.mark.parametrize("content", [None, b"", AFTER + b"\n"])
def test_what_is_neither_is_an_edit(tree, content):
    with pytest.raises(EditedError, match=f"{ATTENTION} was (deleted|changed)"):
        ledger.original(tree, ATTENTION, content, ROW)


def test_a_lost_original_is_no_matter_for_vendor(tree):
    with pytest.raises(OverlayError, match=r"is missing or damaged.*delete .*literals\.json") as it:
        ledger.original(tree, ATTENTION, AFTER, ROW)
    assert "vendor" not in str(it.value)
