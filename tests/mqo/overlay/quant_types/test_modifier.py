import itertools
import json
import subprocess
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mqo.errors import EditedError, OverlayError, UnknownNameError
from mqo.overlay import literals, records, transaction
from mqo.overlay import tree as tree_module
from mqo.overlay.apply import apply
from mqo.overlay.apply import restore as restore_upstream
from mqo.overlay.quant_types import modifier
from mqo.overlay.quant_types.gemms import SITES
from mqo.overlay.tree import Tree, sha256
from mqo.quant import formats

from ...conftest import Mini, contents, materialize
from ..conftest import commit_all, git
from .lookalike import ATTENTION, LAYERS, LINEAR, attention, layers, read, write

ALL = dict.fromkeys(SITES, "mxfp4")


@pytest.fixture
def root(tmp_path):
    return write(tmp_path / "tree", {LAYERS: layers(), ATTENTION: attention()})


@pytest.fixture
def ours(vendored, tmp_path):
    """A copy of the patched tree: its two files, every type at none, and what `mqo` knows."""
    root = tmp_path / "ours"
    write(root, {path: literals.neutral(vendored.read(path)) for path in (LAYERS, ATTENTION)})
    store = root / ".mqo"
    store.mkdir()
    manifest = json.loads((vendored.store / "manifest.json").read_text())
    upstream = json.loads((vendored.store / "upstream.json").read_text())
    for table in (manifest, upstream):
        table["files"] = {path: table["files"][path] for path in (LAYERS, ATTENTION)}
    (store / "manifest.json").write_text(json.dumps(manifest))
    (store / "upstream.json").write_text(json.dumps(upstream))
    return root


def types(root):
    return {state.site.name: state.type for state in modifier.check(root).sites}


def was(root):
    return {state.site.name: state.was for state in modifier.check(root).sites}


def changed_lines(old, new):
    """[(line before, line after)] of two files of as many lines."""
    assert old.count(b"\n") == new.count(b"\n")
    pairs = zip(old.splitlines(keepends=True), new.splitlines(keepends=True), strict=True)
    return [(a, b) for a, b in pairs if a != b]


# -- modify ------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", SITES)
def test_a_modification_changes_the_sites_literal_and_no_other_byte(root, site):
    before = read(root)
    outcome = modifier.modify(root, {site: "none" if site != "wgrad" else "mxfp8"})
    (edit,) = outcome.edits
    other = ATTENTION if edit.path == LAYERS else LAYERS
    assert read(root)[other] == before[other]
    ((old, new),) = changed_lines(before[edit.path], read(root)[edit.path])
    assert new == old.replace(edit.before.encode(), edit.after.encode())
    assert before[edit.path].splitlines()[edit.line - 1] == old.rstrip(b"\n")
    assert types(root)[site] == edit.after


@pytest.mark.parametrize(
    "form",
    [
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: text.replace("'", '"').encode(),
        lambda text: text.replace("    ", "\t").encode(),
        lambda text: text.encode("utf-8-sig"),
        lambda text: text.rstrip("\n").encode(),
        lambda text: text.replace("print('", "print('é").encode(),
        lambda text: ("# coding: latin-1\n# \xe9\n" + text).encode("latin-1"),
        lambda text: text.replace("\n    def ", "\n\x0c    def ").encode(),
        lambda text: text.replace("\n", "\r").encode(),
        lambda text: (text + "\n   \n\t# end\n  ").encode(),
    ],
    ids=[
        *("CRLF", "double quotes", "tabs", "BOM", "no last line end", "not ASCII", "latin-1"),
        *("form feeds", "carriage returns", "blank ends"),
    ],
)
def test_files_of_every_form_are_set_and_restored(tmp_path, form):
    root = write(tmp_path, {LAYERS: form(layers()), ATTENTION: form(attention())})
    before = read(root)
    modifier.modify(root, ALL)
    assert types(root) == ALL
    for path, content in read(root).items():
        assert len(changed_lines(before[path], content)) == (3 if path == LAYERS else 1)
    modifier.restore(root)
    assert read(root) == before


def test_the_linear_type_is_the_forwards_and_a_difference_behind_it_is_told(root):
    outcome = modifier.modify(root, {"fprop": "mxfp4"})
    assert [edit.site for edit in outcome.edits] == ["fprop"]
    assert outcome.warnings == [
        "linear layers differ: fprop mxfp4, dgrad mxfp8, wgrad none; "
        "--dgrad-quant mxfp4 --wgrad-quant mxfp4 makes them equal",
    ]
    assert modifier.modify(root, ALL).warnings == []
    assert modifier.modify(root, {"qk": "none"}).warnings == []


def test_an_absent_backward_is_no_difference(tmp_path):
    root = write(tmp_path, {LAYERS: layers(backward="pass\n"), ATTENTION: attention()})
    assert modifier.modify(root, {"fprop": "mxfp8"}).warnings == []


def test_branches_with_a_literal_each_are_all_set(tmp_path):
    forward = """
    if x:
        custom_quant_type = 'mxfp8'
        return mm(total_input, weight, custom_quant_type)
    custom_quant_type = 'none'
    return mm(total_input, weight, custom_quant_type)
    """
    root = write(tmp_path, {LAYERS: layers(forward=forward), ATTENTION: attention()})
    assert types(root)["fprop"] == "differs"
    outcome = modifier.modify(root, {"fprop": "mxfp4"})
    assert [(edit.before, edit.after) for edit in outcome.edits] == [
        ("mxfp8", "mxfp4"),
        ("none", "mxfp4"),
    ]
    assert types(root)["fprop"] == "mxfp4"
    assert was(root)["fprop"] == "mxfp8 none"


SHARED = """
custom_quant_type = 'none'
s = mm(query, key, custom_quant_type)
return mm(softmax(s), value, custom_quant_type)
"""


@pytest.fixture
def sharing(tmp_path):
    return write(tmp_path, {LAYERS: layers(), ATTENTION: attention(SHARED)})


@pytest.mark.parametrize("site", ["qk", "pv"])
def test_a_literal_of_two_sites_is_not_set_for_one(sharing, site):
    before = contents(sharing / "megatron")
    with pytest.raises(OverlayError) as caught:
        modifier.modify(sharing, {site: "mxfp8"})
    other = {"qk": "pv", "pv": "qk"}[site]
    assert str(caught.value) == (
        f"{ATTENTION}:4 is the literal of {site} and {other}: it cannot be set for only one. "
        f"Expected: a separate literal for {site}. Give {other} the same type, or set it for all "
        "with `--shared`."
    )
    assert contents(sharing / "megatron") == before


@pytest.mark.parametrize(
    ("requested", "shared"),
    [({"qk": "mxfp8"}, True), ({"pv": "mxfp8"}, True), ({"qk": "mxfp8", "pv": "mxfp8"}, False)],
)
def test_a_literal_of_two_sites_is_set_for_both(sharing, requested, shared):
    before = contents(sharing / "megatron")
    outcome = modifier.modify(sharing, requested, shared=shared)
    assert [(e.site, e.line, e.after) for e in outcome.edits] == [
        ("qk", 4, "mxfp8"),
        ("pv", 4, "mxfp8"),
    ]
    assert (types(sharing)["qk"], types(sharing)["pv"]) == ("mxfp8", "mxfp8")
    assert [edit.site for edit in modifier.restore(sharing).edits] == ["qk", "pv"]
    assert contents(sharing / "megatron") == before


@pytest.mark.parametrize("shared", [False, True])
def test_a_literal_of_two_sites_cannot_have_two_types(sharing, shared):
    with pytest.raises(OverlayError, match=r"literal of .*the same type"):
        modifier.modify(sharing, {"qk": "mxfp8", "pv": "none"}, shared=shared)
    assert types(sharing)["qk"] == "none"


def test_a_refused_site_stops_the_whole_modification(tmp_path):
    body = (
        "custom_quant_type = 'none'\ncustom_quant_type = f()\n"
        "return mm(query, key, custom_quant_type)\n"
    )
    root = write(tmp_path, {LAYERS: layers(), ATTENTION: attention(body)})
    before = contents(root / "megatron")
    with pytest.raises(OverlayError, match=rf"^{ATTENTION}:4 .*custom_quant_type for qk"):
        modifier.modify(root, {"fprop": "mxfp8", "qk": "mxfp8"})
    assert contents(root / "megatron") == before
    assert not (root / ".mqo").exists()


def test_an_unknown_type_names_the_valid_ones(root):
    with pytest.raises(
        UnknownNameError, match=r"'bf16'.*one of fp4_ue5m3, fp8_block, .*mxfp4, .*none"
    ):
        modifier.modify(root, {"qk": "bf16"})


def test_what_is_so_already_is_left_alone_and_makes_no_folder(root):
    assert modifier.modify(root, {"fprop": "hifp8"}).edits == []
    assert modifier.restore(root).files == {}
    assert not (root / ".mqo").exists()


def test_a_tree_without_megatron_is_named(tmp_path):
    with pytest.raises(OverlayError, match=r"Expected: megatron/core.*`mqo vendor`"):
        modifier.check(tmp_path)


# -- dry run -----------------------------------------------------------------------------------


def test_a_dry_run_writes_nothing_and_its_diff_is_the_modification(root, tmp_path):
    before = contents(root / "megatron")
    diff = modifier.modify(root, ALL, dry_run=True).diff
    assert contents(root / "megatron") == before
    assert not (root / ".mqo").exists()
    subprocess.run(["patch", "-p1", "-s"], cwd=root, input=diff, check=True)
    patched = read(root)
    write(root, {LAYERS: layers(), ATTENTION: attention()})
    modifier.modify(root, ALL)
    assert read(root) == patched


def test_a_dry_restoration_shows_what_would_come_back(root):
    modifier.modify(root, ALL)
    now = contents(root / "megatron")
    diff = modifier.restore(root, dry_run=True).diff
    assert b"\n-custom_quant_type = 'mxfp4'" in diff.replace(b"-        ", b"-")
    assert contents(root / "megatron") == now


# -- restore -----------------------------------------------------------------------------------


def test_restore_gives_back_the_bytes_of_before_the_first_modification(root):
    before = contents(root / "megatron")
    for value in ("mxfp8", "none", "hifp8"):
        modifier.modify(root, dict.fromkeys(SITES, value))
    outcome = modifier.restore(root)
    assert contents(root / "megatron") == before
    assert {edit.site: (edit.before, edit.after) for edit in outcome.edits} == {
        "dgrad": ("hifp8", "mxfp8"),
        "wgrad": ("hifp8", "none"),
        "qk": ("hifp8", "mxfp4"),
        "pv": ("hifp8", "bf16"),
    }
    assert not (root / ".mqo" / records.LITERALS).exists()


def test_a_way_back_by_hand_leaves_nothing_to_restore(root):
    modifier.modify(root, {"fprop": "none"})
    modifier.modify(root, {"fprop": "hifp8"})
    assert Tree(root).modified() == {}
    assert modifier.restore(root).files == {}


def test_after_a_restoration_the_next_modification_is_the_first(root):
    modifier.modify(root, ALL)
    modifier.restore(root)
    write(root, {LAYERS: layers() + "# mine\n"})
    modifier.modify(root, ALL)
    modifier.restore(root)
    assert read(root)[LAYERS] == (layers() + "# mine\n").encode()


STEPS = st.one_of(
    st.just({}),
    st.dictionaries(st.sampled_from(SITES), st.sampled_from(["none", "mxfp8", "mxfp4", "hifp8"])),
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(STEPS, max_size=5),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from([0o644, 0o755, 0o600, 0o664]),
)
def test_any_modifications_and_a_restoration_give_the_same_bytes(tmp_path, steps, ending, mode):
    """An empty step is a restoration in between."""
    texts = {LAYERS: layers(), ATTENTION: attention()}
    root = write(tmp_path, {path: text.replace("\n", ending) for path, text in texts.items()})
    for path in texts:
        (root / path).chmod(mode)
    before = contents(root / "megatron")
    for step in steps:
        modifier.modify(root, step) if step else modifier.restore(root)
        assert {**types(root), **step} == types(root)
    modifier.restore(root)
    assert contents(root / "megatron") == before


# -- other hands -------------------------------------------------------------------------------


def edit(root, path=LAYERS):
    file = root / path
    file.write_bytes(file.read_bytes() + b"# mine\n")


def test_a_file_that_was_edited_since_is_refused_and_the_other_can_be_modified(root):
    modifier.modify(root, ALL)
    edit(root)
    now = contents(root / "megatron")
    for command in (modifier.restore, lambda root: modifier.modify(root, {"fprop": "none"})):
        with pytest.raises(EditedError, match=rf"{LAYERS} was changed "):
            command(root)
    assert contents(root / "megatron") == now
    assert modifier.check(root).due == (
        f"{LAYERS} changed by other means since its types were set",
    )
    modifier.modify(root, {"qk": "none"})
    assert types(root)["qk"] == "none"


def test_a_file_that_was_deleted_since_is_refused(root):
    modifier.modify(root, ALL)
    (root / ATTENTION).unlink()
    with pytest.raises(EditedError, match=rf"{ATTENTION} was deleted "):
        modifier.restore(root)
    assert modifier.check(root).due == (
        f"{ATTENTION} changed by other means since its types were set",
        f"{ATTENTION} does not exist",
    )


@pytest.mark.parametrize("content", [b"# mine\n", None], ids=["edited", "deleted"])
def test_force_restores_a_file_that_was_changed_since_and_keeps_a_copy(root, content):
    before = read(root)
    modifier.modify(root, ALL)
    if content is None:
        (root / LAYERS).unlink()
    else:
        (root / LAYERS).write_bytes(content)
    changed = contents(root / "megatron")
    plan = modifier.restore(root, force=True, dry_run=True)
    assert contents(root / "megatron") == changed
    outcome = modifier.restore(root, force=True)
    assert outcome.overwritten == plan.overwritten == [LAYERS]
    assert read(root) == before
    assert not modifier.check(root).due
    copies = [path for path in (root / ".mqo/kept").rglob("*") if path.is_file()]
    assert [path.read_bytes() for path in copies] == ([] if content is None else [content])


def test_force_without_changes_by_hand_restores_as_usual(root):
    before = read(root)
    modifier.modify(root, ALL)
    outcome = modifier.restore(root, force=True)
    assert (outcome.overwritten, read(root)) == ([], before)
    assert not (root / ".mqo/kept").exists()


def test_bytes_that_came_back_by_other_means_are_no_edit(root):
    before = read(root)
    modifier.modify(root, ALL)
    write(root, before)
    assert modifier.check(root).due == ()
    assert set(was(root).values()) == {None}
    assert modifier.restore(root).files == {}
    assert Tree(root).modified() == {}


# -- what is in the way ------------------------------------------------------------------------


def test_two_at_once_come_one_after_the_other(root):
    before = read(root)
    with Tree(root).locked("a test"):
        first = threading.Thread(target=modifier.modify, args=(root, {"fprop": "mxfp4"}))
        second = threading.Thread(target=modifier.modify, args=(root, {"qk": "none"}))
        first.start(), second.start()
        assert read(root) == before
    first.join(), second.join()
    assert (types(root)["fprop"], types(root)["qk"]) == ("mxfp4", "none")
    modifier.restore(root)
    assert read(root) == before


@pytest.mark.parametrize(
    "read_only", [modifier.check, lambda root: modifier.modify(root, ALL, dry_run=True)]
)
def test_a_command_that_only_reads_waits_for_one_that_writes(root, monkeypatch, read_only):
    released = threading.Event()
    monkeypatch.setattr(tree_module.time, "sleep", lambda seconds: released.set())

    def write_a_while():
        with Tree(root).locked("a test"):
            (root / ".mqo/incoming").mkdir()
            started.set()
            assert released.wait(60)
            (root / ".mqo/incoming").rmdir()

    started = threading.Event()
    writer = threading.Thread(target=write_a_while)
    writer.start()
    assert started.wait(60)
    done = read_only(root)
    writer.join()
    assert not getattr(done, "due", None)


class Killed(BaseException):
    pass


def cut_off(root, monkeypatch, at, types):
    """A modification that ends at the first step of that name, as a killed process would."""

    def stop(name):
        if name == at:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(transaction, "step", stop)
        modifier.modify(root, types)


@pytest.mark.parametrize("at", ["stage", "journal", "files", "records", "tidy", "done"])
def test_a_modification_that_was_cut_off_is_shown_and_the_next_command_ends_it(
    root, monkeypatch, at, caplog
):
    before = contents(root / "megatron")
    cut_off(root, monkeypatch, at, ALL)
    due = (modifier.CUT_OFF,)
    assert modifier.check(root).due == due
    with pytest.raises(OverlayError, match="`--restore`"):
        modifier.modify(root, ALL, dry_run=True)
    assert modifier.check(root).due == due
    modifier.modify(root, {"qk": "hifp8"})
    assert modifier.check(root).due == ()
    finished = at not in ("stage", "journal")
    assert types(root)["fprop"] == ("mxfp4" if finished else "hifp8")
    assert "killed" in caplog.text
    modifier.restore(root)
    assert contents(root / "megatron") == before


def test_a_command_that_was_cut_off_before_there_were_sources_is_shown(tmp_path):
    (tmp_path / ".mqo/incoming").mkdir(parents=True)
    assert modifier.check(tmp_path).due == (modifier.CUT_OFF,)


# -- check -------------------------------------------------------------------------------------


def test_check_shows_types_values_and_what_was_before(root):
    report = modifier.check(root)
    assert {s.site.name: (s.type, s.unknown) for s in report.sites} == {
        "fprop": ("hifp8", ()),
        "dgrad": ("mxfp8", ()),
        "wgrad": ("none", ()),
        "qk": ("mxfp4", ()),
        "pv": ("none", ("bf16",)),
    }
    assert (report.due, report.notes) == ((), ())
    modifier.modify(root, {"pv": "mxfp8"})
    assert was(root) == {"fprop": None, "dgrad": None, "wgrad": None, "qk": None, "pv": "bf16"}


def test_check_needs_one_literal_and_calls_no_absent_site_due(tmp_path):
    plain = "return torch.bmm(torch.bmm(query, key), value)\n"
    root = write(tmp_path, {LAYERS: layers(backward="pass\n"), ATTENTION: attention(plain)})
    assert modifier.check(root).due == ()
    write(tmp_path, {LAYERS: layers("pass\n", "pass\n")})
    assert modifier.check(root).due == ("no literal at any site",)


def test_check_notes_literals_of_no_site(tmp_path):
    root = write(tmp_path, {LAYERS: "custom_quant_type = 'a'\n" + layers(), ATTENTION: attention()})
    assert modifier.check(root).notes == (f"{LAYERS}:1 is a literal that no GEMM of a site reads",)


# -- in a git work tree ------------------------------------------------------------------------


@pytest.mark.usefixtures("plain_git")
def test_git_sees_the_modified_files_alone_and_nothing_after_restore(root):
    commit_all(root)
    modifier.modify(root, {"fprop": "none"})
    assert git(root, "status", "--porcelain") == f" M {LAYERS}\n"
    modifier.modify(root, {"pv": "none"})
    assert git(root, "status", "--porcelain") == f" M {LAYERS}\n M {ATTENTION}\n"
    assert git(root, "diff", "--shortstat").startswith(" 2 files changed, 2 insertions(+), 2 del")
    modifier.restore(root)
    assert git(root, "status", "--porcelain") == ""


# -- our tree ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("site", "value"), zip(formats.SITES, itertools.cycle(["mxfp8", "mxfp4", "hifp8"]))
)
def test_every_literal_of_our_tree_is_set_alone_and_restored(ours, site, value):
    before = read(ours)
    modifier.modify(ours, {site: value})
    changes = [c for p in (LAYERS, ATTENTION) for c in changed_lines(before[p], read(ours)[p])]
    ((old, new),) = changes
    assert old.strip() == b"custom_quant_type = 'none'"
    assert new == old.replace(b"none", value.encode())
    assert types(ours) == {**dict.fromkeys(formats.SITES, "none"), site: value}
    modifier.restore(ours)
    assert read(ours) == before


@pytest.mark.parametrize("site", formats.ATTENTION_BACKWARD)
def test_a_tree_without_our_patches_has_no_literal_of_the_backward_pass(root, site):
    before = contents(root / "megatron")
    with pytest.raises(OverlayError, match=rf"no literal for {site}"):
        modifier.modify(root, {"qk": "mxfp8", site: "mxfp8"})
    assert contents(root / "megatron") == before


def test_a_type_that_our_quantizer_would_refuse_is_due(ours):
    file = ours / LAYERS
    file.write_bytes(file.read_bytes().replace(b"= 'none'", b"= 'bf16'", 1))
    (due,) = modifier.check(ours).due
    assert "'bf16'" in due


def test_our_unpatched_tree_says_how_to_patch_it(vendored, tmp_path):
    root = write(tmp_path, {path: vendored.pristine(path) for path in (LAYERS, ATTENTION)})
    (root / ".mqo").mkdir()
    (root / ".mqo/upstream.json").write_text("{}")
    assert modifier.check(root).due == (
        "no literal at any site; `mqo apply` patches the tree, which gives it the sites",
    )
    with pytest.raises(OverlayError, match=r"no literal for the GEMM of fprop.*`mqo apply`"):
        modifier.modify(root, {"fprop": "mxfp8"})


# -- between two modifications, `mqo` ----------------------------------------------------------

PLAIN = layers(
    "return torch.matmul(total_input, weight)\n", "return torch.matmul(grad_output, weight)\n"
)
PLAIN_ATTENTION = attention("return torch.bmm(torch.bmm(query, key), value)\n")
SERIES = """
schema = 1

[[entry]]
name = "quant_sites"
kind = "site"
upstream = ">=1"
reason = "Gives the GEMMs a type."
"""
PATCH = f"""
from mqo.overlay.edits import Anchor, FileEdits, InsertBefore

def site(name, method, operand):
    anchor = Anchor(f"torch.matmul({{operand}}, weight)")
    code = f"custom_quant_type = 'none'\\nx = bind('{{name}}', custom_quant_type)\\n"
    return InsertBefore(f"{LINEAR}.{{method}}", (anchor,), code)

FPROP, DGRAD = site("fprop", "forward", "total_input"), site("dgrad", "backward", "grad_output")
FILES = (FileEdits("{LAYERS}", (FPROP, DGRAD)),)
"""


@pytest.fixture
def kept(tmp_path):
    """A tree that `mqo` vendored and patched."""
    tree = materialize(
        tmp_path / "kept", {LAYERS: PLAIN.encode(), ATTENTION: PLAIN_ATTENTION.encode()}
    )
    write(tmp_path / "patches", {"series.toml": SERIES, "quant_sites.py": PATCH})
    kept = Mini(tree, tmp_path / "patches")
    apply(tree, kept.series)
    return kept


def repatch(kept):
    """Apply the series after an upgrade, which writes the bindings in other words."""
    kept.change_patch("quant_sites.py", "x = bind(", "x = tie(")
    apply(kept.tree, kept.series)


def test_after_mqo_restore_nothing_is_modified(kept):
    modifier.modify(kept.tree.root, {"fprop": "mxfp8"})
    restore_upstream(kept.tree, kept.series)
    assert modifier.check(kept.tree.root).due == (
        "no literal at any site; `mqo apply` patches the tree, which gives it the sites",
    )
    assert modifier.restore(kept.tree.root).files == {}
    assert kept.tree.read(LAYERS) == PLAIN.encode()
    assert kept.tree.modified() == {}


def test_after_mqo_restore_and_apply_nothing_is_modified(kept):
    before = kept.tree.read(LAYERS)
    modifier.modify(kept.tree.root, {"fprop": "mxfp8"})
    restore_upstream(kept.tree, kept.series)
    apply(kept.tree, kept.series)
    modifier.modify(kept.tree.root, {"dgrad": "mxfp4"})
    modifier.restore(kept.tree.root)
    assert kept.tree.read(LAYERS) == before


def test_a_type_that_mqo_apply_took_along_is_still_a_modification(kept):
    modifier.modify(kept.tree.root, {"fprop": "mxfp8"})
    repatch(kept)
    assert was(kept.tree.root)["fprop"] == "none"
    assert types(kept.tree.root)["fprop"] == "mxfp8"
    modifier.modify(kept.tree.root, {"dgrad": "mxfp4"})
    (edit, other) = modifier.restore(kept.tree.root).edits
    assert (edit.before, edit.after, other.before, other.after) == (
        *("mxfp8", "none"),
        *("mxfp4", "none"),
    )
    (patched,) = (f for p, f in kept.tree.patched().files.items() if p == LAYERS)
    assert sha256(kept.tree.read(LAYERS)) == patched.final


def test_mqo_restore_and_an_upgrade_leave_nothing_modified(kept):
    modifier.modify(kept.tree.root, {"fprop": "mxfp8"})
    restore_upstream(kept.tree, kept.series)
    repatch(kept)
    assert set(was(kept.tree.root).values()) == {None}
    assert modifier.restore(kept.tree.root).files == {}
    assert b"tie(" in kept.tree.read(LAYERS)


def test_a_literal_that_was_set_by_hand_since_is_an_edit(kept):
    modifier.modify(kept.tree.root, {"fprop": "mxfp8"})
    path = kept.tree.root / LAYERS
    path.write_bytes(path.read_bytes().replace(b"'mxfp8'", b"'mxfp4'"))
    with pytest.raises(EditedError, match=" was changed "):
        modifier.restore(kept.tree.root)


def replace_by_link(path):
    moved = path.rename(path.with_name(f"moved-{path.name}"))
    path.symlink_to(moved)


def replace_by_folder(path):
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    path.mkdir()


REFUSED = {
    "a read-only file": lambda root: (root / LAYERS).chmod(0o444),
    "a read-only folder": lambda root: (root / LAYERS).parent.chmod(0o555),
    "a link for a file": lambda root: replace_by_link(root / LAYERS),
    "a link for a folder": lambda root: replace_by_link((root / LAYERS).parent),
    "a tree that may not be written": lambda root: root.chmod(0o555),
    "a link for .mqo": lambda root: (root / ".mqo").symlink_to(root.parent),
    "a file for .mqo": lambda root: (root / ".mqo").write_text(""),
    "a folder for a record": lambda root: replace_by_folder(root / ".mqo" / records.LITERALS),
    "a folder for the lock": lambda root: replace_by_folder(root / ".mqo" / "lock"),
    "a folder for the journal": lambda root: replace_by_folder(root / ".mqo" / "journal.json"),
}


@pytest.mark.parametrize("damage", REFUSED.values(), ids=REFUSED)
def test_a_dry_run_refuses_what_the_modification_refuses_and_neither_writes(damage, root):
    damage(root)
    before = contents(root)
    try:
        for dry_run in (True, False):
            with pytest.raises(OverlayError):
                modifier.modify(root, ALL, dry_run=dry_run)
            assert contents(root) == before
    finally:
        for folder in (root, (root / LAYERS).parent):
            folder.chmod(0o755)
