from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mqo.errors import DriftError, EditedError, OverlayError, UnknownNameError
from mqo.overlay.apply import (
    AlreadyApplied,
    AlreadyPristine,
    Applied,
    Restored,
    apply,
    names_to_restore,
    restore,
)
from mqo.overlay.series import Series
from mqo.overlay.status import status
from mqo.project import Project

from ..conftest import FILES, contents, materialize

CHANGED = 3  # files that the series of `mini` changes
NAMES = ("ours", "quant_sites", "new_engine")


def types(mini):
    return {literal.site: literal.value for _, literal in status(mini.tree, mini.series).types}


# -- there and back ----------------------------------------------------------------------------


def test_apply_writes_what_the_series_says_and_a_second_apply_nothing(mini):
    assert apply(mini.tree, mini.series) == Applied(CHANGED, NAMES)
    layers = mini.tree.read("megatron/core/layers.py").decode()
    assert "torch.matmul( fprop.lhs(x),fprop.rhs(weight) )   # trailing words" in layers
    assert "dgrad.lhs(grad).matmul(dgrad.rhs(weight))" in layers
    assert layers.count("custom_quant_type = 'none'") == 2
    assert mini.tree.read("megatron/training/loop.py") == b"def run():\n\tnew_engine.start(2)\n"
    assert mini.tree.read("megatron/core/plain.py") == FILES["megatron/core/plain.py"]
    before = contents(mini.tree.root / "megatron")
    assert apply(mini.tree, mini.series) == AlreadyApplied(CHANGED)
    assert contents(mini.tree.root / "megatron") == before


def test_restore_gives_back_every_byte_and_mode(mini):
    mini.path("core/layers.py").chmod(0o755)
    mini.path("core/gadget.py").chmod(0o600)
    before = contents(mini.tree.root / "megatron")
    apply(mini.tree, mini.series)
    assert contents(mini.tree.root / "megatron") != before
    assert restore(mini.tree, mini.series) == Restored(CHANGED, NAMES)
    assert mini.tree.manifest() is None
    assert restore(mini.tree, mini.series) == AlreadyPristine()
    assert contents(mini.tree.root / "megatron") == before


# -- refusals: nothing is written --------------------------------------------------------------


@pytest.mark.parametrize("command", [apply, restore])
def test_an_edited_file_is_shown_and_nothing_is_changed(patched, command):
    patched.change_patch("new_engine.py", '"new_engine"', '"newer_engine"')
    patched.path("core/layers.py").write_bytes(patched.path("core/layers.py").read_bytes() + b"#\n")
    before = contents(patched.tree.root / "megatron")
    with pytest.raises(EditedError, match=r"core/layers\.py.*--force") as error:
        command(patched.tree, patched.series)
    assert "\n+#\n" in error.value.detail
    assert contents(patched.tree.root / "megatron") == before


@pytest.mark.parametrize("damage", ["edited", "deleted"])
@pytest.mark.parametrize("command", [apply, restore])
def test_force_overwrites_an_edit_and_keeps_a_copy(patched, command, damage):
    path = patched.path("core/layers.py")
    path.write_bytes(b"mine\n") if damage == "edited" else path.unlink()
    outcome = command(patched.tree, patched.series, force=True)
    copies = [(patched.tree.root / copy).read_bytes() for copy in outcome.kept]
    assert copies == ([b"mine\n"] if damage == "edited" else [])
    assert status(patched.tree, patched.series).edited == ()
    if command is restore:
        assert patched.bytes() == FILES


def test_an_edit_of_a_file_that_no_entry_touches_stays_and_is_named(patched):
    patched.edit("core/plain.py", b"42", b"43")
    assert apply(patched.tree, patched.series) == AlreadyApplied(CHANGED)
    outcome = restore(patched.tree, patched.series)
    assert outcome == Restored(CHANGED, NAMES, left=("megatron/core/plain.py",))
    assert patched.path("core/plain.py").read_bytes() == b"answer = 43"
    assert restore(patched.tree, patched.series) == AlreadyPristine(("megatron/core/plain.py",))


def test_a_file_edited_before_it_was_ever_patched_is_an_edit_too(mini):
    mini.edit("core/layers.py", b"A linear", b"My linear")
    with pytest.raises(EditedError, match="layers"):
        apply(mini.tree, mini.series)
    assert mini.tree.manifest() is None


def test_many_edited_files_are_counted(patched, tmp_path):
    files = [f"megatron/core/gadget{i}.py" for i in range(5)]
    gadgets = dict.fromkeys(files, FILES["megatron/core/gadget.py"])
    patched = replace(patched, tree=materialize(tmp_path / "many", {**FILES, **gadgets}))
    apply(patched.tree, patched.series)
    for path in files:
        (patched.tree.root / path).write_bytes(b"mine")
    with pytest.raises(EditedError, match="and 2 more"):
        restore(patched.tree, patched.series)


def test_a_patch_that_does_not_fit_leaves_the_tree_pristine(mini):
    mini.change_patch("quant_sites.py", '"torch.matmul(x, weight)"', '"torch.matmul(x, w)"')
    with pytest.raises(DriftError, match=" 0 times"):
        apply(mini.tree, mini.series)
    assert mini.bytes() == FILES
    assert mini.tree.manifest() is None


def test_a_tree_of_another_version_is_refused_naming_both(tmp_path, mini):
    tree = materialize(tmp_path / "other", FILES, version="2.0.0")
    with pytest.raises(DriftError, match=r">=1,<2.*2\.0\.0"):
        apply(tree, mini.series)


def test_restore_with_a_damaged_object_writes_nothing(patched):
    digest = patched.tree.manifest().files["megatron/training/loop.py"].pristine
    (patched.tree.store / "objects" / digest).write_bytes(b"damaged")
    before = contents(patched.tree.root / "megatron")
    with pytest.raises(OverlayError, match="is missing or damaged"):
        restore(patched.tree, patched.series)
    assert contents(patched.tree.root / "megatron") == before


# -- a series that has changed -----------------------------------------------------------------


@pytest.fixture
def replaced(patched):
    """A patched tree with quant types set, and a series that has changed since then: one file is
    patched otherwise, and one no more.
    """
    patched.set_types(fprop="mxfp8")
    patched.change_patch("new_engine.py", '"new_engine"', '"newer_engine"')
    patched.change_patch(
        "new_engine.py", '("megatron/core/", "megatron/training/")', '("megatron/core/",)'
    )
    return patched


def test_a_changed_patch_is_applied_anew(replaced):
    assert apply(replaced.tree, replaced.series) == Applied(2, NAMES)
    assert b"newer_engine.start" in replaced.tree.read("megatron/core/gadget.py")
    loop = "megatron/training/loop.py"
    assert replaced.tree.read(loop) == FILES[loop]
    restore(replaced.tree, replaced.series)
    assert replaced.bytes() == FILES


def test_an_entry_that_left_the_series_is_undone(patched):
    rest = patched.series.without("quant_sites")
    assert apply(patched.tree, rest) == Applied(1, ("ours", "new_engine"))
    layers = "megatron/core/layers.py"
    assert patched.tree.read(layers) == FILES[layers]
    assert b"new_engine" in patched.tree.read("megatron/core/gadget.py")


# -- some entries alone ------------------------------------------------------------------------


def test_a_named_entry_comes_with_what_it_requires_and_others_join_it(mini):
    assert apply(mini.tree, mini.series, ["quant_sites"]) == Applied(1, ("ours", "quant_sites"))
    assert mini.tree.manifest().names == ("ours", "quant_sites")
    assert mini.bytes()["megatron/core/gadget.py"] == FILES["megatron/core/gadget.py"]
    assert apply(mini.tree, mini.series, ["new_engine"]) == Applied(2, NAMES)
    assert apply(mini.tree, mini.series) == AlreadyApplied(CHANGED)


@pytest.mark.parametrize("first", ["quant_sites", "new_engine"])
def test_entries_are_restored_one_by_one_in_any_order(patched, first):
    (second,) = {"quant_sites", "new_engine"} - {first}
    whole = patched.bytes()
    outcome = restore(patched.tree, patched.series, [first])
    assert outcome.entries == (first,)
    assert outcome.remaining == ("ours", second)
    assert restore(patched.tree, patched.series, [first]) == AlreadyPristine()
    restore(patched.tree, patched.series, [second])
    assert patched.bytes() == FILES
    apply(patched.tree, patched.series, ["quant_sites", "new_engine"])
    assert patched.bytes() == whole


def test_what_another_entry_requires_is_not_restored_alone(patched):
    with pytest.raises(OverlayError, match=r"quant_sites .* ours.*`mqo restore ours --with-dep"):
        restore(patched.tree, patched.series, ["ours"])
    outcome = restore(patched.tree, patched.series, ["ours", "quant_sites"])
    assert outcome.remaining == ("new_engine",)


def test_entries_are_restored_with_all_that_depend_on_them(vendored):
    """On the real series, whose entries depend on one another in several steps."""
    series = Series.of_project(Project.here())
    applied = vendored.manifest().names
    gone = names_to_restore(series, applied, ["quant_sites"], with_dependents=True)
    rest = [entry for entry in series.entries if entry.name in {*applied} - gone]
    assert gone > {"quant_sites", "fused_attention"}
    assert not any(gone.intersection(entry.requires) for entry in rest)
    every = {"quant_sites"}
    while more := {e.name for e in series.entries if every.intersection(e.requires)} - every:
        every |= more
    assert gone == every
    with pytest.raises(OverlayError) as error:
        names_to_restore(series, applied, ["quant_sites"], with_dependents=False)
    for name in every:
        assert name in str(error.value)


@pytest.mark.parametrize("command", [apply, restore])
def test_an_unknown_entry_is_named_with_the_known_ones(patched, command):
    with pytest.raises(UnknownNameError, match=r"'sites'.*new_engine, ours, quant_sites"):
        command(patched.tree, patched.series, ["sites"])


# -- files of ours in a tree that lacks them ----------------------------------------------------


@pytest.fixture
def elsewhere(mini, tmp_path):
    """The series of `mini`, and another tree that has none of our files."""
    series = Series.load(mini.patches, ours=mini.tree.root)
    return materialize(tmp_path / "elsewhere", FILES), series


@pytest.mark.parametrize("content", [b"def operands(*args): ...\n", b""])
def test_our_files_are_placed_and_removed_again(elsewhere, mini, content):
    tree, series = elsewhere
    (mini.tree.root / "megatron/ours.py").write_bytes(content)
    before = contents(tree.root / "megatron")
    assert apply(tree, series) == Applied(CHANGED + 1, NAMES)
    assert tree.read("megatron/ours.py") == content
    assert apply(tree, series) == AlreadyApplied(CHANGED + 1)
    assert status(tree, series).clean
    restore(tree, series)
    assert contents(tree.root / "megatron") == before


def test_folders_of_ours_are_gone_with_their_bytecode(elsewhere, mini):
    tree, series = elsewhere
    mini.change_patch("series.toml", "megatron/ours.py", "megatron/ours")
    (mini.tree.root / "megatron/ours/deep").mkdir(parents=True)
    (mini.tree.root / "megatron/ours/deep/x.py").write_text("x = 1\n")
    series = Series.load(mini.patches, ours=mini.tree.root)
    apply(tree, series)
    cache = tree.root / "megatron/ours/deep/__pycache__"
    cache.mkdir()
    (cache / "x.cpython-311.pyc").write_bytes(b"")
    restore(tree, series)
    assert not (tree.root / "megatron/ours").exists()


def test_a_changed_file_of_ours_is_placed_anew(elsewhere, mini):
    tree, series = elsewhere
    apply(tree, series)
    (mini.tree.root / "megatron/ours.py").write_text("operands = print\n")
    assert apply(tree, series) == Applied(1, NAMES)
    assert tree.read("megatron/ours.py") == b"operands = print\n"


def test_a_file_of_somebody_elses_is_not_overwritten_by_ours(elsewhere):
    tree, series = elsewhere
    (tree.root / "megatron/ours.py").write_text("theirs\n")
    with pytest.raises(EditedError, match=r"megatron/ours\.py"):
        apply(tree, series)
    assert tree.read("megatron/ours.py") == b"theirs\n"


def test_a_file_of_ours_that_upstream_has_too_is_not_placed(mini, tmp_path):
    series = Series.load(mini.patches, ours=mini.tree.root)
    files = {**FILES, "megatron/ours.py": b"upstream's\n"}
    tree = materialize(tmp_path / "elsewhere", files)
    outcome = apply(tree, series)
    assert outcome.not_placed == ("megatron/ours.py",)
    assert tree.read("megatron/ours.py") == b"upstream's\n"
    restore(tree, series)
    assert {path: tree.read(path) for path in files} == files


# -- quant types -------------------------------------------------------------------------------


def test_a_quant_type_is_no_edit(patched):
    patched.set_types(fprop="mxfp4", dgrad="hifp8")
    assert patched.tree.edited_files() == []
    assert apply(patched.tree, patched.series) == AlreadyApplied(CHANGED)
    assert types(patched) == {"fprop": "mxfp4", "dgrad": "hifp8"}


def test_quant_types_survive_a_reapplication(replaced):
    apply(replaced.tree, replaced.series)
    assert types(replaced) == {"fprop": "mxfp8", "dgrad": "none"}


# -- any source --------------------------------------------------------------------------------

LINES = st.sampled_from(
    [
        "x = old_engine.start(1)",
        "s = 'old_engine'  # old_engine",
        "s = 'é∂'; y = old_engine",
        "y = [old_engine.a,   old_engine.b]   ",
        "def f():\n\treturn old_engine.f(\n\t\told_engine.g\n\t)",
        "",
        "\x0c",
        '"""words"""',
        "x = (1,)",
    ]
)
SOURCES = st.builds(
    lambda lines, ending, final, bom: (
        (b"\xef\xbb\xbf" if bom else b"")
        + "\n".join(lines).replace("\n", ending).encode()
        + (ending.encode() if final else b"")
    ),
    st.lists(LINES, max_size=6),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(gadget=SOURCES, loop=SOURCES, names=st.permutations(["newer", "engine_of_old"]))
def test_apply_then_restore_is_the_identity_on_any_source(
    tmp_path_factory, gadget, loop, names, mini
):
    files = {**FILES, "megatron/core/gadget.py": gadget, "megatron/training/loop.py": loop}
    tree = materialize(tmp_path_factory.mktemp("any"), files)
    apply(tree, mini.series)
    for path in ("megatron/core/gadget.py", "megatron/training/loop.py"):
        undone = tree.read(path).replace(b"new_engine", b"old_engine")
        assert undone == files[path]
    restore(tree, mini.series)
    assert {path: tree.read(path) for path in files} == files
