import json
import os
import shutil

import pytest
from mqo.errors import OverlayError, UnknownNameError
from mqo.overlay import literals, runtime
from mqo.overlay.apply import apply
from mqo.overlay.patch_files import export
from mqo.overlay.series import Series
from mqo.project import Project

from ..conftest import FILES, materialize
from .conftest import commit_all, git

LAYERS = "megatron/core/layers.py"
LATIN = b"# coding: latin-1\n# caf\xe9\x0c\n" + FILES[LAYERS]  # a file that a site patch edits
OURS = b'"""Ours."""\r\n\x0c\n\ndef operands(*args): ...  # caf\xe9, no line end'
USE = "import old_engine\nstart = old_engine.start('é')\n"
# Sources of every kind, all of which the codemod changes.
KINDS = {
    "lines": USE.encode(),
    "crlf": USE.replace("\n", "\r\n").encode(),
    "mixed": USE.encode() + b"# more\r\n\r\nstop = old_engine.stop\n",
    "bom": b"\xef\xbb\xbf" + USE.encode(),
    "no_end": USE.encode().rstrip(),
    "feeds": b"import old_engine\x0c\n\x0c\nstart = old_engine.start\n\x0c",
    "separator": "s = '\u2028\x85'\nold_engine.start()\n".encode(),
    "lone_cr": b"import old_engine\rstart = old_engine.start\rend = 1\n",
    "one line": b"old_engine.start",
}


@pytest.fixture
def tree(mini, tmp_path):
    """A patched tree that files of ours were placed in, and its series."""
    (mini.tree.root / "megatron/ours.py").write_bytes(OURS)
    kinds = {f"megatron/core/kinds/{name}.py": content for name, content in KINDS.items()}
    tree = materialize(tmp_path / "elsewhere", {**FILES, LAYERS: LATIN, **kinds})
    apply(tree, Series.load(mini.patches, ours=mini.tree.root))
    return tree


@pytest.fixture
def series(mini):
    return Series.load(mini.patches, ours=mini.tree.root)


@pytest.fixture
def repository(tmp_path):
    """What the patches must not be written into."""
    (tmp_path / "repository/deep").mkdir(parents=True)
    return tmp_path / "repository"


@pytest.fixture
def write(tree, series, repository):
    """A function that exports the tree's patches to a folder: the paths."""

    def run(target, *names):
        return export(tree, series, names, target, repository=repository)

    return run


def pristine_copy(tree, root):
    """Upstream's files alone, in a folder that is a git repository."""
    for path in tree.upstream().files:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(tree.pristine(path))
    git(root, "init", "-q")
    return root


def git_apply(root, patches):
    git(root, "apply", *patches)


def git_am(root, patches):
    """Commit upstream's files, then each patch: {subject: rest of the message}."""
    commit_all(root)
    git(root, "am", "--keep-cr", *map(str, patches))
    messages = git(root, "log", "--format=%s%x00%b%x01", f"-{len(patches)}").split("\x01")[:-1]
    return dict(message.strip().split("\0") for message in messages)


def files_in(root):
    """{path: content}, but for what git and mqo keep."""
    paths = [p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    found = {p.relative_to(root).as_posix(): p.read_bytes() for p in paths}
    return {p: c for p, c in found.items() if p.split("/")[0] not in (".git", ".mqo")}


# -- what is written -----------------------------------------------------------------------------


@pytest.mark.usefixtures("plain_git")
def test_the_patches_turn_upstreams_files_into_the_patched_tree(tree, write, tmp_path):
    copy = pristine_copy(tree, tmp_path / "copy")
    git_apply(copy, write(tmp_path / "out"))
    assert files_in(copy) == files_in(tree.root)
    assert all(b"new_engine" in files_in(copy)[f"megatron/core/kinds/{kind}.py"] for kind in KINDS)
    assert (copy / "megatron/ours.py").read_bytes() == OURS
    assert b"caf\xe9\x0c\n" in (copy / LAYERS).read_bytes()
    assert b"custom_quant_type" in (copy / LAYERS).read_bytes()


@pytest.mark.usefixtures("plain_git")
def test_git_am_makes_a_commit_of_each_entry_with_its_reason(tree, series, write, tmp_path):
    copy = pristine_copy(tree, tmp_path / "copy")
    commits = git_am(copy, write(tmp_path / "out"))
    assert files_in(copy) == files_in(tree.root)
    assert list(commits) == [f"{e.name} ({e.kind})" for e in reversed(series.entries)]
    for entry in series.entries:
        assert entry.reason in commits[f"{entry.name} ({entry.kind})"]


@pytest.mark.usefixtures("plain_git")
@pytest.mark.parametrize("content", [b"", b"\n", b"x = 1"])
def test_a_new_file_of_ours_may_be_small(mini, write, series, tree, tmp_path, content):
    (mini.tree.root / "megatron/ours.py").write_bytes(content)
    apply(tree, series)
    copy = pristine_copy(tree, tmp_path / "copy")
    git_apply(copy, write(tmp_path / "out"))
    assert (copy / "megatron/ours.py").read_bytes() == content


@pytest.mark.usefixtures("plain_git")
def test_the_tree_in_which_our_files_lie_gives_the_same_patches(patched, repository, tmp_path):
    written = export(patched.tree, patched.series, (), tmp_path / "out", repository=repository)
    assert written[0].name == "0001-ours.patch"
    copy = pristine_copy(patched.tree, tmp_path / "copy")
    git_apply(copy, written)
    assert files_in(copy) == files_in(patched.tree.root)


def test_there_is_one_file_an_entry_with_its_reason(write, tmp_path):
    written = write(tmp_path / "out")
    assert written == tuple(sorted((tmp_path / "out").iterdir()))
    assert [path.name for path in written] == [
        "0001-ours.patch",
        "0002-quant_sites.patch",
        "0003-new_engine.patch",
    ]
    head = written[1].read_bytes().split(b"diff --git")[0].decode()
    assert head.splitlines()[2:] == [
        "Subject: [PATCH] quant_sites (site)",
        "",
        "Gives the GEMMs a type.",
        "",
        "For megatron-core 1.2.3.",
        "---",
    ]


@pytest.mark.usefixtures("plain_git")
def test_a_long_reason_is_wrapped(mini, tree, series, write, tmp_path):
    words = " ".join(["--- a/reason of many words", "+++ b/more"] * 9)
    mini.change_patch("series.toml", "Gives the GEMMs a type.", words)
    series = Series.load(mini.patches, ours=mini.tree.root)
    written = export(tree, series, (), tmp_path / "out", repository=mini.patches)
    lines = written[1].read_bytes().split(b"\n---\n")[0].decode().splitlines()
    assert " ".join(line.strip() for line in lines[4:-2]) == words
    assert max(map(len, lines)) <= 72
    git_apply(pristine_copy(tree, tmp_path / "copy"), written)
    commits = git_am(pristine_copy(tree, tmp_path / "other"), written)
    assert " ".join(commits["quant_sites (site)"].split()) == f"{words} For megatron-core 1.2.3."


def test_quant_types_in_the_source_are_not_exported(tree, write, tmp_path):
    before = [path.read_bytes() for path in write(tmp_path / "before")]
    content = literals.write(tree.read(LAYERS), {"fprop": "mxfp8"})
    assert content != tree.read(LAYERS)
    (tree.root / LAYERS).write_bytes(content)
    assert [path.read_bytes() for path in write(tmp_path / "out")] == before


def test_named_entries_keep_their_numbers(write, tmp_path):
    both = write(tmp_path / "both", "new_engine", "ours")
    assert [path.name for path in both] == ["0001-ours.patch", "0003-new_engine.patch"]
    whole = {path.name: path.read_bytes() for path in write(tmp_path / "whole")}
    assert all(whole[path.name] == path.read_bytes() for path in both)


def test_an_entry_that_the_series_holds_no_more(tree, series, repository, tmp_path):
    rest = series.without("new_engine")
    written = export(tree, rest, (), tmp_path / "out", repository=repository)
    assert (
        b"\nSubject: [PATCH] new_engine\n\nAn entry that the series no longer"
        in written[2].read_bytes()
    )


@pytest.mark.usefixtures("plain_git")
def test_a_file_name_that_is_no_utf8(mini, series, repository, tmp_path):
    path = os.fsdecode(b"megatron/core/caf\xe9 au lait.py")
    tree = materialize(tmp_path / "elsewhere", {**FILES, path: KINDS["lines"]})
    apply(tree, series)
    copy = pristine_copy(tree, tmp_path / "copy")
    git_apply(copy, export(tree, series, (), tmp_path / "out", repository=repository))
    assert files_in(copy) == files_in(tree.root)


# -- what is refused -----------------------------------------------------------------------------


def test_an_existing_target_is_refused(write, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(OverlayError, match="out exists"):
        write(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("target", ["", "new", "deep/er/new", "../repository/new", "../link/new"])
@pytest.mark.parametrize("relative", [False, True])
def test_a_target_in_this_repository_is_refused(write, repository, monkeypatch, target, relative):
    (repository.parent / "link").symlink_to(repository / "deep")
    before = sorted(repository.rglob("*"))
    monkeypatch.chdir(repository)
    place = repository / target if not relative else (repository / target).relative_to(repository)
    with pytest.raises(OverlayError, match="this project's repository"):
        write(place)
    assert sorted(repository.rglob("*")) == before


def test_a_repository_that_is_reached_through_a_link_is_guarded_too(tree, series, repository):
    link = repository.parent / "link"
    link.symlink_to(repository)
    with pytest.raises(OverlayError, match="this project's repository"):
        export(tree, series, (), repository / "out", repository=link)


def test_an_unknown_entry_is_refused(write, tmp_path):
    with pytest.raises(UnknownNameError, match=r"'typo'.*new_engine, ours, quant_sites"):
        write(tmp_path / "out", "ours", "typo")
    assert not (tmp_path / "out").exists()


def test_an_unpatched_tree_is_refused(mini, series, repository, tmp_path):
    for tree, match in ((mini.tree, "is not patched"), (type(mini.tree)(repository), "mqo vendor")):
        with pytest.raises(OverlayError, match=match):
            export(tree, series, (), tmp_path / "out", repository=mini.patches)
    assert not (tmp_path / "out").exists()
    assert not (repository / ".mqo").exists()


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def mqo(tree, mini, repository, monkeypatch, command_line):
    """A function that runs `mqo diff --export`: its exit code, its output and its errors."""
    shutil.copytree(mini.patches, repository / "patches")
    ours = repository / "Megatron-LM/megatron/ours.py"
    ours.parent.mkdir(parents=True)
    shutil.copyfile(mini.path("ours.py"), ours)
    monkeypatch.setattr(Project, "here", classmethod(lambda cls: Project(repository)))

    def run(*words):
        return command_line("diff", *words, "--tree", tree.root)

    return run


def test_the_command_lists_what_it_wrote(mqo, tmp_path):
    code, out, _ = mqo("--export", tmp_path / "out")
    assert code == 0
    assert out.splitlines() == [str(path) for path in sorted((tmp_path / "out").iterdir())]
    code, out, _ = mqo("new_engine", "--json", "--export", tmp_path / "json")
    assert code == 0
    assert json.loads(out)["exported"] == [str(tmp_path / "json/0003-new_engine.patch")]


def test_the_command_refuses_this_repository(mqo, repository):
    code, out, err = mqo("--export", repository / "out")
    assert (code, out) == (2, "")
    assert "this project's repository" in err
    assert not (repository / "out").exists()


# -- the real series -----------------------------------------------------------------------------


@pytest.mark.usefixtures("plain_git")
def test_the_real_series_gives_the_real_tree(vendored, tmp_path):
    project = Project.here()
    series = Series.load(project.patches, ours=project.tree)
    written = export(vendored, series, (), tmp_path / "out", repository=project.root)
    copy = pristine_copy(vendored, tmp_path / "copy")
    git_apply(copy, written)
    manifest = vendored.manifest()
    upstream = vendored.upstream().files
    for path, content in files_in(copy).items():
        if path in manifest.files:
            assert content == vendored.object(manifest.files[path].final), path
        elif path in upstream:
            assert content == vendored.pristine(path), path
        else:
            start = runtime.origin(path)
            assert content == (start.read_bytes() if start else vendored.read(path)), path
    assert (copy / runtime.FOLDER / "mqo/quant/formats.toml").exists()
    assert len(written) >= 5
