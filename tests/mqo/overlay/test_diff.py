import re
import shutil
import subprocess

import pytest
from mqo.errors import OverlayError, UnknownNameError
from mqo.overlay import diff
from mqo.overlay.apply import apply
from mqo.overlay.diff import LOCAL, EntryDiff, entry_diffs, local_diffs, tree_diff
from mqo.overlay.series import Series
from mqo.overlay.unified import unified
from mqo.project import Project

from ..conftest import FILES, materialize


def report(mini, *names, form="short"):
    changes = diff.changes(mini.tree, mini.series, names)
    return "\n".join(diff.diff_lines(mini.series, changes, form))


def local(mini):
    return {change.path: change for change in local_diffs(mini.tree, mini.tree.manifest())}


def git_apply(root, text):
    command = ["git", "apply", "--unsafe-paths", "--whitespace=nowarn", "-p1", "-"]
    subprocess.run(command, input=text, cwd=root, check=True, capture_output=True)


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


# -- the text ----------------------------------------------------------------------------------


def test_equal_contents_have_no_diff():
    assert unified("x.py", b"a\n", b"a\n") == b""


@needs_git
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"a\nb\n", b"a\nc\n"),
        (b"a\nb", b"a\nc"),
        (b"a\nb", b"a\nb\n"),
        (b"a\r\nb\r\n", b"a\r\nc\r\n"),
        (b"a\x0cb\nc\n", b"a\x0cb\nd\n"),
        ("a\u2028b\nc\n".encode(), "a\u2028b\nd\n".encode()),
        (b"a\n" * 30, b"a\n" * 12 + b"b\n" + b"a\n" * 18),
    ],
)
def test_a_diff_turns_the_one_content_into_the_other(tmp_path, before, after):
    (tmp_path / "x.py").write_bytes(before)
    git_apply(tmp_path, unified("x.py", before, after))
    assert (tmp_path / "x.py").read_bytes() == after


@needs_git
def test_the_diff_of_a_whole_tree_turns_upstreams_source_into_it(tmp_path, patched):
    patched.set_types(fprop="mxfp8")
    copy = materialize(tmp_path / "copy", FILES)
    git_apply(copy.root, tree_diff(patched.tree, patched.tree).encode())
    assert {p: copy.read(p) for p in FILES} == patched.bytes()
    assert copy.read("megatron/ours.py") == patched.tree.read("megatron/ours.py")


def test_of_an_unpatched_tree_only_our_own_files_differ(mini):
    text = tree_diff(mini.tree, mini.tree)
    assert "--- /dev/null\n+++ b/megatron/ours.py\n" in text
    assert text.count("+++") == 1


# -- entry by entry ----------------------------------------------------------------------------


def test_an_entry_shows_its_own_change_and_none_of_the_others(mini):
    mini.change_patch("quant_sites.py", "operands('{site}'", "old_engine.operands('{site}'")
    apply(mini.tree, mini.series)
    (sites,) = entry_diffs(mini.tree, mini.tree.manifest(), "quant_sites")
    assert "+        fprop = old_engine.operands" in sites.text
    swept = {d.path: d for d in entry_diffs(mini.tree, mini.tree.manifest(), "new_engine")}
    change = swept["megatron/core/layers.py"]
    assert (change.added, change.removed) == (2, 2)
    assert "+        fprop = new_engine.operands" in change.text


# -- what came after the series ----------------------------------------------------------------


def test_a_tree_as_it_was_applied_has_no_local_change(patched):
    assert local(patched) == {}


def test_a_quant_type_and_hand_edits_are_local_changes(patched):
    patched.set_types(fprop="mxfp8")
    patched.edit("core/gadget.py", b"Uses", b"Abuses")
    patched.edit("core/plain.py", b"42", b"43")
    changes = local(patched)
    assert {change.entry for change in changes.values()} == {LOCAL}
    assert "+        custom_quant_type = 'mxfp8'" in changes["megatron/core/layers.py"].text
    assert '+"""Abuses' in changes["megatron/core/gadget.py"].text
    assert "-answer = 42\n" in changes["megatron/core/plain.py"].text


def test_the_lines_around_the_diffs_fit_in_80_columns():
    series = Series.of_project(Project.here())
    names = (*series.names, LOCAL, "unknown")
    changes = [EntryDiff("megatron/core/layers.py", b"", name) for name in names]
    lines = list(diff.diff_lines(series, changes, "stat"))
    assert max(map(len, lines)) <= 80 and all(line.startswith("#") for line in lines)
    text = " ".join(line.strip("# ") for line in lines)
    assert all(entry.reason in text for entry in series.entries)


def test_a_deleted_file_is_a_local_change(patched):
    patched.path("core/gadget.py").unlink()
    assert local(patched)["megatron/core/gadget.py"].added == 0


# -- the report --------------------------------------------------------------------------------


def test_the_report_shows_sites_in_full_and_codemods_as_counts(patched):
    text = report(patched)
    assert "# quant_sites (site): Gives the GEMMs a type." in text
    assert "+        custom_quant_type = 'none'" in text
    assert "#   megatron/core/gadget.py  +1 -1" in text
    assert "new_engine.start" not in text
    assert "#   megatron/ours.py  +1 -0" in text


def test_a_codemod_is_shown_in_full_when_asked_for(patched):
    assert "+start = new_engine.start" in report(patched, form="full")


def test_of_everything_counts_alone_can_be_shown(patched):
    text = report(patched, form="stat")
    assert "#   megatron/core/layers.py  +7 -2" in text
    assert "\n+" not in text
    counts = re.findall(r"^#   (\S+)  \+(\d+) -(\d+)$", text, re.MULTILINE)
    added, removed = (sum(int(row[i]) for row in counts) for i in (1, 2))
    total = f"# total: {len({row[0] for row in counts})} files, +{added} -{removed}"
    assert text.splitlines()[-1] == total


def test_a_named_entry_is_shown_alone(patched):
    patched.set_types(fprop="mxfp8")
    text = report(patched, "new_engine")
    assert "custom_quant_type" not in text


def test_local_changes_come_last(patched):
    patched.set_types(fprop="mxfp8")
    text = report(patched)
    assert text.index("# changed since the series") > text.index("# new_engine (codemod)")
    assert text.index("+        custom_quant_type = 'mxfp8'") > text.index("# changed since")


def test_an_unpatched_tree_says_so(mini):
    assert report(mini) == "# nothing differs"


def test_an_entry_of_an_unpatched_tree_is_an_error(mini):
    with pytest.raises(OverlayError, match="is not patched"):
        report(mini, "new_engine")


def test_an_unknown_entry_is_an_error(patched):
    with pytest.raises(UnknownNameError, match="'typo'"):
        report(patched, "typo")
