from mqo.overlay.apply import apply, restore
from mqo.overlay.status import status


def states(mini):
    return {entry.name: entry.state for entry in status(mini.tree, mini.series).entries}


def test_a_pristine_tree_has_nothing_applied_and_is_not_clean(mini):
    now = status(mini.tree, mini.series)
    assert (now.version, now.origin) == ("1.2.3", "wheel of our own")
    assert set(states(mini).values()) == {"not applied"}
    assert not now.clean
    assert now.types == ()


def test_a_patched_tree_is_clean_and_counts_its_files_and_status_writes_nothing(patched):
    before = {p: p.stat().st_mtime_ns for p in patched.tree.root.rglob("*")}
    now = status(patched.tree, patched.series)
    assert {p: p.stat().st_mtime_ns for p in patched.tree.root.rglob("*")} == before
    assert now.clean
    assert {e.name: e.files for e in now.entries} == {"ours": 1, "quant_sites": 1, "new_engine": 2}


def test_the_quant_types_are_shown_with_their_places(patched):
    layers = patched.path("core/layers.py").read_text().splitlines()
    for path, literal in status(patched.tree, patched.series).types:
        assert path == "megatron/core/layers.py"
        assert layers[literal.line - 1].strip() == f"custom_quant_type = '{literal.value}'"
        assert f"'{literal.site}'" in layers[literal.line]


def test_a_hand_edit_is_named_and_the_tree_is_not_clean(patched):
    patched.edit("core/plain.py", b"42", b"43")
    now = status(patched.tree, patched.series)
    assert now.edited == ("megatron/core/plain.py",)
    assert not now.clean


def test_a_changed_patch_is_outdated(patched):
    patched.change_patch("new_engine.py", '"new_engine"', '"newer_engine"')
    assert states(patched) == {
        "ours": "applied",
        "quant_sites": "applied",
        "new_engine": "outdated",
    }


def test_a_patch_that_came_later_is_not_applied(mini):
    apply(mini.tree, mini.series.without("new_engine"))
    assert states(mini)["new_engine"] == "not applied"


def test_a_patch_that_left_the_series_is_dropped_and_the_tree_is_not_clean(patched):
    now = status(patched.tree, patched.series.without("new_engine"))
    assert [(e.name, e.state, e.files) for e in now.entries][-1] == ("new_engine", "dropped", 2)
    assert not now.clean


def test_a_pristine_file_of_a_patched_tree_makes_its_entry_incomplete(patched):
    path = "megatron/core/gadget.py"
    pristine = patched.tree.object(patched.tree.manifest().files[path].pristine)
    (patched.tree.root / path).write_bytes(pristine)
    assert states(patched) == {
        "ours": "applied",
        "quant_sites": "applied",
        "new_engine": "incomplete",
    }


def test_a_restored_tree_reads_as_one_that_was_never_patched(patched):
    restore(patched.tree, patched.series)
    assert set(states(patched).values()) == {"not applied"}


def test_a_release_that_the_series_was_not_verified_on_is_named(patched, mqo):
    assert status(patched.tree, patched.series).unsupported == ""
    patched.change_patch("series.toml", '">=1,<2"\n\n[[', '">=1,<1.2"\n\n[[')
    now = status(patched.tree, patched.series)
    assert (now.unsupported, now.clean) == (">=1,<1.2", False)
    code, out, _ = mqo("status")
    assert code == 1
    assert "not supported: the patch series is for megatron-core >=1,<1.2" in out
