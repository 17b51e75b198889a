import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mqo.errors import DriftError, EditedError, OverlayError
from mqo.overlay import apply as module
from mqo.overlay import literals
from mqo.overlay.apply import (
    AlreadyApplied,
    AlreadyPristine,
    Applied,
    Restored,
    apply,
    restore,
)
from mqo.overlay.status import status
from mqo.overlay.tree import PatchedFile, Tree

from ..conftest import FILES, materialise

CHANGED = 3  # files that the series of `mini` changes


def files_on_disk(tree):
    """Every file outside mqo's own folder, with its bytes and mode."""
    paths = [p for p in tree.root.rglob("*") if p.is_file() and tree.store not in p.parents]
    return {p: (p.read_bytes(), p.stat().st_mode) for p in paths}


def types(mini):
    return {literal.site: literal.value for _, literal in status(mini.tree, mini.series).types}


def set_types(mini, **wanted):
    path = mini.path("core/layers.py")
    path.write_bytes(literals.write(path.read_bytes(), wanted))


class Killed(BaseException):
    """Ends a command in its middle, as a signal would."""


@pytest.fixture
def killed_after(monkeypatch):
    """Let the next command write so many files of the tree, then kill it."""

    def arm(writes):
        real, counter = module.write_file, itertools.count()

        def write_file(path, content):
            if next(counter) == writes:
                raise Killed
            real(path, content)

        monkeypatch.setattr(module, "write_file", write_file)

    yield arm
    monkeypatch.undo()


def killed(command, *args):
    with pytest.raises(Killed):
        command(*args)


# -- there and back ----------------------------------------------------------------------------


def test_apply_writes_what_the_series_says(mini):
    assert apply(mini.tree, mini.series) == Applied(CHANGED, ("ours", "quant_sites", "new_engine"))
    layers = mini.tree.read("megatron/core/layers.py").decode()
    assert "torch.matmul( fprop.lhs(x),fprop.rhs(weight) )   # trailing words" in layers
    assert "dgrad.lhs(grad).matmul(dgrad.rhs(weight))" in layers
    assert layers.count("custom_quant_type = 'none'") == 2
    assert mini.tree.read("megatron/training/loop.py") == b"def run():\n\tnew_engine.start(2)\n"
    assert mini.tree.read("megatron/core/plain.py") == FILES["megatron/core/plain.py"]


def test_restore_gives_back_every_byte_and_mode(mini):
    mini.path("core/layers.py").chmod(0o755)
    mini.path("core/gadget.py").chmod(0o600)
    before = files_on_disk(mini.tree)
    apply(mini.tree, mini.series)
    assert files_on_disk(mini.tree) != before
    assert restore(mini.tree) == Restored(CHANGED)
    assert files_on_disk(mini.tree) == before
    assert mini.tree.manifest() is None


def test_applying_twice_changes_nothing(patched):
    before = files_on_disk(patched.tree)
    assert apply(patched.tree, patched.series) == AlreadyApplied(CHANGED)
    assert files_on_disk(patched.tree) == before


def test_restoring_a_pristine_tree_changes_nothing(mini):
    assert restore(mini.tree) == AlreadyPristine()
    assert mini.bytes() == FILES


def test_applying_after_restoring_gives_the_same_bytes(patched):
    before = files_on_disk(patched.tree)
    restore(patched.tree)
    apply(patched.tree, patched.series)
    assert files_on_disk(patched.tree) == before


def test_files_of_ours_are_neither_changed_nor_removed(patched):
    before = patched.path("ours.py").read_bytes()
    restore(patched.tree)
    assert patched.path("ours.py").read_bytes() == before


# -- refusals: nothing is written --------------------------------------------------------------


@pytest.mark.parametrize("command", ["apply", "restore"])
@pytest.mark.parametrize("name", ["core/layers.py", "core/plain.py"])
def test_an_edited_file_is_named_and_nothing_is_changed(patched, command, name):
    patched.change_patch("new_engine.py", '"new_engine"', '"newer_engine"')
    patched.path(name).write_bytes(patched.path(name).read_bytes() + b"# mine\n")
    before = files_on_disk(patched.tree)
    with pytest.raises(EditedError, match=name):
        apply(patched.tree, patched.series) if command == "apply" else restore(patched.tree)
    assert files_on_disk(patched.tree) == before


def test_many_edited_files_are_counted(patched):
    for path in FILES:
        (patched.tree.root / path).unlink()
    with pytest.raises(EditedError, match="and 3 more"):
        restore(patched.tree)


def test_a_patch_that_does_not_fit_leaves_the_tree_pristine(mini):
    mini.change_patch("quant_sites.py", '"torch.matmul(x, weight)"', '"torch.matmul(x, w)"')
    with pytest.raises(DriftError, match="occurs 0 times instead of 1"):
        apply(mini.tree, mini.series)
    assert mini.bytes() == FILES
    assert mini.tree.manifest() is None


def test_a_tree_of_another_version_is_refused_naming_both(tmp_path, mini):
    tree = materialise(tmp_path / "other", FILES, version="2.0.0")
    with pytest.raises(DriftError, match=r">=1,<2.*2\.0\.0"):
        apply(tree, mini.series)


@pytest.mark.parametrize("command", [lambda t, s: apply(t, s), lambda t, s: restore(t)])
def test_a_folder_without_a_tree_is_refused_and_left_as_it_is(tmp_path, mini, command):
    with pytest.raises(OverlayError, match="Run `mqo vendor`"):
        command(Tree(tmp_path / "nowhere"), mini.series)
    assert not (tmp_path / "nowhere").exists()


def test_restore_checks_its_bytes_against_upstreams_before_it_writes(patched):
    manifest = patched.tree.manifest()
    wrong = patched.tree.keep(b"something else\n")
    path = "megatron/core/gadget.py"
    file = manifest.files[path]
    manifest.files[path] = PatchedFile(wrong, file.stages)
    patched.tree.write_manifest(manifest)
    before = files_on_disk(patched.tree)
    with pytest.raises(OverlayError, match=r"gadget\.py was pristine when it was patched"):
        restore(patched.tree)
    assert files_on_disk(patched.tree) == before


def test_restore_with_a_damaged_object_writes_nothing(patched):
    digest = patched.tree.manifest().files["megatron/training/loop.py"].pristine
    (patched.tree.store / "objects" / digest).write_bytes(b"damaged")
    before = files_on_disk(patched.tree)
    with pytest.raises(OverlayError, match="is missing or damaged"):
        restore(patched.tree)
    assert files_on_disk(patched.tree) == before


# -- cut off in the middle ---------------------------------------------------------------------


@pytest.mark.parametrize("writes", range(CHANGED))
def test_an_apply_that_was_cut_off_is_finished_by_repeating_it(mini, killed_after, writes):
    killed_after(writes)
    killed(apply, mini.tree, mini.series)
    states = {entry.name: entry.state for entry in status(mini.tree, mini.series).entries}
    assert "incomplete" in states.values()
    killed_after(-1)
    apply(mini.tree, mini.series)
    assert status(mini.tree, mini.series).clean


@pytest.mark.parametrize("writes", range(CHANGED))
def test_an_apply_that_was_cut_off_is_undone_by_restore(mini, killed_after, writes):
    killed_after(writes)
    killed(apply, mini.tree, mini.series)
    killed_after(-1)
    restore(mini.tree)
    assert mini.bytes() == FILES


@pytest.mark.parametrize("writes", range(CHANGED))
def test_a_restore_that_was_cut_off_is_finished_by_repeating_it(patched, killed_after, writes):
    killed_after(writes)
    killed(restore, patched.tree)
    killed_after(-1)
    restore(patched.tree)
    assert patched.bytes() == FILES


@pytest.fixture
def replaced(patched):
    """A patched tree with quant types set, and a series that has changed since then: one file is
    patched otherwise, and one no more.
    """
    set_types(patched, fprop="mxfp8")
    patched.change_patch("new_engine.py", '"new_engine"', '"newer_engine"')
    patched.change_patch(
        "new_engine.py", '("megatron/core/", "megatron/training/")', '("megatron/core/",)'
    )
    return patched


@pytest.mark.parametrize("writes", range(2))
def test_a_reapplication_that_was_cut_off_is_finished_by_repeating_it(
    replaced, killed_after, writes
):
    killed_after(writes)
    killed(apply, replaced.tree, replaced.series)
    killed_after(-1)
    apply(replaced.tree, replaced.series)
    assert status(replaced.tree, replaced.series).clean
    assert types(replaced) == {"fprop": "mxfp8", "dgrad": "none"}
    assert all(not file.earlier for file in replaced.tree.manifest().files.values())


@pytest.mark.parametrize("writes", range(2))
def test_a_reapplication_that_was_cut_off_is_undone_by_restore(replaced, killed_after, writes):
    killed_after(writes)
    killed(apply, replaced.tree, replaced.series)
    killed_after(-1)
    restore(replaced.tree)
    assert replaced.bytes() == FILES


def test_a_reapplication_can_be_cut_off_again_and_again(replaced, killed_after):
    for i in range(3):
        replaced.change_patch("new_engine.py", '"newer_engine"', f'"newer{i}_engine"')
        killed_after(i % 2)
        killed(apply, replaced.tree, replaced.series)
        killed_after(-1)
        replaced.change_patch("new_engine.py", f'"newer{i}_engine"', '"newer_engine"')
    apply(replaced.tree, replaced.series)
    assert status(replaced.tree, replaced.series).clean


# -- a series that has changed -----------------------------------------------------------------


def test_a_changed_patch_is_applied_anew(replaced):
    assert apply(replaced.tree, replaced.series) == Applied(
        2, ("ours", "quant_sites", "new_engine")
    )
    assert b"newer_engine.start" in replaced.tree.read("megatron/core/gadget.py")
    loop = "megatron/training/loop.py"
    assert replaced.tree.read(loop) == FILES[loop]
    restore(replaced.tree)
    assert replaced.bytes() == FILES


def test_an_entry_that_left_the_series_is_undone(patched):
    rest = patched.series.without("quant_sites")
    apply(patched.tree, rest)
    layers = "megatron/core/layers.py"
    assert patched.tree.read(layers) == FILES[layers]
    assert b"new_engine" in patched.tree.read("megatron/core/gadget.py")


# -- quant types -------------------------------------------------------------------------------


def test_a_quant_type_is_no_edit(patched):
    set_types(patched, fprop="mxfp4", dgrad="hifp8")
    assert patched.tree.edited_files() == []
    assert apply(patched.tree, patched.series) == AlreadyApplied(CHANGED)
    assert types(patched) == {"fprop": "mxfp4", "dgrad": "hifp8"}


def test_quant_types_survive_a_reapplication(replaced):
    apply(replaced.tree, replaced.series)
    assert types(replaced) == {"fprop": "mxfp8", "dgrad": "none"}


def test_restore_gives_upstreams_bytes_whatever_the_quant_types(patched):
    set_types(patched, fprop="mxfp4")
    restore(patched.tree)
    assert patched.bytes() == FILES


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
    tree = materialise(tmp_path_factory.mktemp("any"), files)
    apply(tree, mini.series)
    for path in ("megatron/core/gadget.py", "megatron/training/loop.py"):
        mended = tree.read(path).replace(b"new_engine", b"old_engine")
        assert mended == files[path]
    restore(tree)
    assert {path: tree.read(path) for path in files} == files
