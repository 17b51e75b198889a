import sysconfig
from dataclasses import replace

import pytest
from mqo.errors import OverlayError, UnknownNameError
from mqo.overlay import literals
from mqo.overlay.apply import apply
from mqo.overlay.plan import plan
from mqo.overlay.snapshot import digests, edits, lend_helper, snapshot
from mqo.overlay.tree import sha256

from ..conftest import FILES, materialize

LAYERS = "megatron/core/layers.py"


@pytest.fixture
def target(tmp_path):
    return tmp_path / "shot"


def types_of(shot):
    return {t.site: t.value for t in literals.read(shot.tree.read(LAYERS))}


def test_a_snapshot_copies_the_patched_tree_and_our_files_but_no_records_and_bytecode(
    patched, target
):
    cache = patched.path("core/__pycache__")
    cache.mkdir()
    (cache / "layers.pyc").write_bytes(b"x")
    shot = snapshot(patched.tree, target)
    assert {path: shot.tree.read(path) for path in FILES} == patched.bytes()
    assert shot.tree.read("megatron/ours.py") is not None
    names = {path.name for path in target.rglob("*")}
    assert names.isdisjoint({".mqo", "__pycache__", "layers.pyc"})
    ours = {p.stat().st_ino for p in patched.tree.root.rglob("*") if p.is_file()}
    assert ours.isdisjoint({p.stat().st_ino for p in target.rglob("*") if p.is_file()})


def test_a_snapshots_files_are_read_only_and_its_folders_can_be_removed(patched, target):
    snapshot(patched.tree, target, types={"fprop": "mxfp8"})
    modes = {p.is_dir(): 0 for p in target.rglob("*")}
    for path in target.rglob("*"):
        modes[path.is_dir()] |= path.stat().st_mode & 0o222
    assert modes[False] == 0
    assert modes[True] & 0o200


def test_a_temporary_snapshot_has_the_same_content_in_hard_links(patched, target, tmp_path):
    modes = {path: path.stat().st_mode for path in patched.tree.root.rglob("*")}
    snapshot(patched.tree, tmp_path / "kept", types={"fprop": "mxfp8"})
    snapshot(patched.tree, target, types={"fprop": "mxfp8"}, is_temporary=True)
    names = [path.relative_to(target) for path in target.rglob("*") if path.is_file()]
    assert digests(target, {}) == digests(tmp_path / "kept", {})
    linked = {str(name) for name in names if (target / name).stat().st_nlink > 1}
    assert linked == {str(name) for name in names} - {LAYERS}
    assert {path: path.stat().st_mode for path in modes} == modes
    assert b"mxfp8" not in patched.tree.read(LAYERS)


@pytest.mark.parametrize(
    "own",
    [{}, {"types": {"fprop": "mxfp8"}}, {"without": ("quant_sites",)}, {"without": ("ours",)}],
    ids=["the tree's types", "a type", "without sites", "without an added file"],
)
def test_the_digests_of_a_copy_are_known_before_it_is_made(patched, target, own):
    patched.path("core/settings.toml").write_text("rate = 1")
    own |= {"series": patched.series}
    expected = digests(patched.tree.root, edits(patched.tree, **own)[0])
    snapshot(patched.tree, target, **own)
    code = [p for p in target.rglob("*") if p.suffix in (".py", ".toml")]
    assert expected == {str(p.relative_to(target)): sha256(p.read_bytes()) for p in code}
    assert "megatron/core/settings.toml" in expected


# -- types -------------------------------------------------------------------------------------


def test_types_are_set_in_the_copy_alone_and_the_sites_not_named_get_none(patched, target):
    patched.set_types(fprop="mxfp4", dgrad="mxfp4")
    before = patched.bytes()
    shot = snapshot(patched.tree, target, types={"fprop": "hifp8"})
    assert types_of(shot) == {"fprop": "hifp8", "dgrad": "none"} == shot.types
    assert shot.shared_types == {"fprop": "mxfp4", "dgrad": "mxfp4"}
    assert patched.bytes() == before


def test_a_site_that_the_tree_lacks_may_have_no_type(patched, target):
    shot = snapshot(patched.tree, target, types={"fprop": "hifp8", "qk": "none"})
    assert shot.types == {"fprop": "hifp8", "dgrad": "none"}


def test_without_types_the_trees_own_are_kept(patched, target):
    patched.set_types(dgrad="mxfp4")
    shot = snapshot(patched.tree, target)
    assert types_of(shot) == {"fprop": "none", "dgrad": "mxfp4"} == shot.types


# -- without an entry --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quant_sites", "new_engine", "ours"])
def test_without_an_entry_the_copy_is_what_the_rest_of_the_series_makes(patched, target, name):
    tree, rest = patched.tree, patched.series.without(name)
    shot = snapshot(tree, target, without=(name,), series=patched.series)
    planned = plan(rest, "1.2.3", FILES, tree.pristine)
    expected = {path: planned[path].content if path in planned else FILES[path] for path in FILES}
    assert {path: shot.tree.read(path) for path in FILES} == expected
    assert (shot.types == {}) == (name != "new_engine")  # the sites require `ours`


def test_the_trees_types_stay_in_files_that_are_made_anew(mini, target):
    mini.edit("core/layers.py", b"return y", b"return old_engine.check(y)")
    files = {**FILES, LAYERS: mini.tree.read(LAYERS)}
    tree = materialize(mini.tree.root, files)
    apply(tree, mini.series)
    mini.set_types(fprop="mxfp8")
    shot = snapshot(tree, target, without=("new_engine",), series=mini.series)
    assert b"old_engine.check" in shot.tree.read(LAYERS)
    assert types_of(shot) == {"fprop": "mxfp8", "dgrad": "none"} == shot.types


def test_an_unknown_site_is_named_before_anything_is_copied(patched, target):
    with pytest.raises(UnknownNameError, match=r"'qq'.*dgrad, fprop"):
        snapshot(patched.tree, target, types={"qq": "mxfp8"})
    assert not target.exists()


def test_leaving_out_an_unknown_entry_is_an_error(patched, target):
    with pytest.raises(UnknownNameError, match="'typo'"):
        snapshot(patched.tree, target, without=("typo",), series=patched.series)
    assert not target.exists()


def test_a_type_for_a_site_that_is_left_out_is_an_error(patched, target):
    with pytest.raises(OverlayError, match="patch quant_sites"):
        snapshot(
            patched.tree,
            target,
            types={"fprop": "mxfp8"},
            without=("quant_sites",),
            series=patched.series,
        )


def test_an_existing_target_is_refused(patched, target):
    target.mkdir()
    with pytest.raises(OverlayError, match="exists"):
        snapshot(patched.tree, target)


def test_an_unpatched_tree_is_refused(mini, target):
    with pytest.raises(OverlayError, match="is not patched"):
        snapshot(mini.tree, target)


def test_leaving_out_an_entry_that_changed_nothing_is_an_error(patched, target):
    unneeded = replace(patched.series["new_engine"], name="unneeded")
    series = replace(patched.series, entries=(*patched.series.entries, unneeded))
    with pytest.raises(OverlayError, match="no effect") as error:
        snapshot(patched.tree, target, without=("unneeded",), series=series)
    assert "the patch" in str(error.value)
    assert not target.exists()


# -- refusals ----------------------------------------------------------------------------------


def test_a_target_inside_the_tree_is_refused(patched):
    target = patched.path("core/shot")
    with pytest.raises(OverlayError, match="in the tree"):
        snapshot(patched.tree, target)
    assert not target.exists()


def test_a_half_patched_tree_is_refused(patched, target):
    loop = "megatron/training/loop.py"
    (patched.tree.root / loop).write_bytes(FILES[loop])
    with pytest.raises(OverlayError, match=r"loop\.py .*`mqo apply`"):
        snapshot(patched.tree, target)
    assert not target.exists()


@pytest.mark.parametrize("code", ["the same", "another"])
def test_a_compiled_helper_is_lent_to_a_tree_with_the_same_code(tmp_path, code):
    mine, theirs = (tmp_path / name / "megatron/core/datasets" for name in ("mine", "theirs"))
    for folder, text in ((mine, "the same"), (theirs, code)):
        folder.mkdir(parents=True)
        (folder / "helpers.cpp").write_text(text)
    helper = f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    lend_helper(tmp_path / "mine", tmp_path / "theirs")
    assert not (theirs / helper).exists()
    (mine / helper).write_bytes(b"compiled")
    lend_helper(tmp_path / "mine", tmp_path / "theirs")
    assert (theirs / helper).exists() == (code == "the same")
