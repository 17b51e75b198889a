"""Git work trees as trees: nothing of theirs is lost, and `git status` is clean afterwards."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from mqo.errors import EditedError, OverlayError, VendorError
from mqo.overlay import diff
from mqo.overlay.apply import AlreadyApplied, AlreadyPristine, Applied, Restored, apply, restore
from mqo.overlay.patch_files import export
from mqo.overlay.pin import Helper
from mqo.overlay.series import Series
from mqo.overlay.snapshot import snapshot
from mqo.overlay.status import status
from mqo.overlay.tree import Tree
from mqo.overlay.vendor import Pin, Vendored, vendor
from mqo.project import Project

from ..conftest import FILES
from .conftest import git

pytestmark = pytest.mark.usefixtures("plain_git")

NAMES = ("ours", "quant_sites", "new_engine")
CHANGED = 4  # three of upstream's files, and one of ours
LAYERS, LOOP, PLAIN = (f"megatron/{p}.py" for p in ("core/layers", "training/loop", "core/plain"))
OTHERS = {
    "README.md": b"Read me.\n",
    "pretrain.py": b"import old_engine\n",
    "tools/a file of two words.py": b"import old_engine\n",
}


@dataclass(frozen=True)
class Repo:
    """A git work tree, and the patch series for it."""

    root: Path
    series: Series

    @property
    def tree(self):
        """Anew each time, as each command makes its own."""
        return Tree(self.root)

    def git(self, *words):
        return git(self.root, *words)

    def dirt(self):
        """What `git status` says, untracked files one by one."""
        return self.git("status", "--porcelain", "-uall").splitlines()

    def commit(self, *options):
        self.git("add", "--all")
        self.git("commit", "-qm", "a commit", *options)

    def write(self, path, content):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(content)

    def read(self, path):
        return (self.root / path).read_bytes()

    def bytes(self):
        return {path: self.read(path) for path in FILES}

    def apply(self, *names, **options):
        return apply(self.tree, self.series, names, **options)

    def restore(self, *names, **options):
        return restore(self.tree, self.series, names, **options)

    def disk(self):
        """{path: (content or link, mode)} of everything but git's and mqo's own."""
        found = {}
        for path in self.root.rglob("*"):
            if path.is_symlink() or path.is_file():
                name = path.relative_to(self.root)
                content = path.readlink() if path.is_symlink() else path.read_bytes()
                if name.parts[0] not in (".git", ".mqo"):
                    found[name] = (content, path.lstat().st_mode)
        return found


@pytest.fixture
def bare(tmp_path, mini):
    """A repository with the files in place, and without a commit."""
    repo = Repo(tmp_path / "checkout", Series.load(mini.patches, ours=mini.tree.root))
    for path, content in (FILES | OTHERS).items():
        repo.write(path, content)
    repo.git("init", "-q", "-b", "main")
    return repo


@pytest.fixture
def repo(bare):
    bare.commit()
    return bare


# -- there and back ------------------------------------------------------------------------------


def test_apply_status_diff_restore(repo):
    before = repo.disk()
    assert repo.apply() == Applied(CHANGED, NAMES)
    assert repo.dirt() == [
        " M megatron/core/gadget.py",
        f" M {LAYERS}",
        f" M {LOOP}",
        "?? megatron/ours.py",
    ]
    now = status(repo.tree, repo.series)
    assert (now.clean, now.version) == (True, "1.2.3")
    assert now.origin == f"git {repo.git('rev-parse', 'HEAD')[:12]}"
    assert repo.apply() == AlreadyApplied(CHANGED)
    changed = {change.path for change in diff.changes(repo.tree, repo.series, ())}
    assert changed == {line[3:] for line in repo.dirt()}
    assert repo.restore() == Restored(CHANGED, NAMES)
    assert repo.disk() == before
    assert repo.dirt() == []
    assert repo.restore() == AlreadyPristine()


def test_the_tour_on_the_command_line(repo, monkeypatch, command_line):
    project = Project(repo.series.entries[0].folder.parent)
    shutil.copytree(repo.series.ours, project.tree)
    shutil.copy(Project.here().upstream_pin, project.tree)
    monkeypatch.setattr(Project, "here", classmethod(lambda cls: project))

    def mqo(*words):
        code, out, _ = command_line(*words, "--tree", repo.root, "--json")
        return code, json.loads(out)

    assert mqo("status")[0] == 1
    assert mqo("apply")[1]["changed"] == CHANGED
    assert mqo("status")[0] == 0
    assert mqo("diff")[0] == 1
    code, said = mqo("vendor")
    assert (code, said["error"]["type"]) == (2, "VendorError")
    assert mqo("restore")[0] == 0
    assert mqo("diff") == (0, {"schema": 1, "command": "diff", "changes": []})
    assert repo.dirt() == []


def test_executable_files_stay_executable(repo):
    for path in (LAYERS, PLAIN, "pretrain.py"):
        (repo.root / path).chmod(0o755)
    repo.commit()
    before = repo.disk()
    repo.apply()
    assert (repo.root / LAYERS).stat().st_mode & 0o777 == 0o755
    repo.restore()
    assert repo.disk() == before
    assert repo.dirt() == []


def test_a_linked_work_tree(repo, tmp_path):
    repo.git("worktree", "add", "-q", "-b", "other", str(tmp_path / "linked"))
    linked = Repo(tmp_path / "linked", repo.series)
    assert (linked.root / ".git").is_file()
    assert linked.apply() == Applied(CHANGED, NAMES)
    assert repo.dirt() == []
    assert repo.apply() == Applied(CHANGED, NAMES)
    for one in (linked, repo):
        one.restore()
        assert one.dirt() == []


# -- what the user has changed -------------------------------------------------------------------


def test_edits_of_files_that_no_entry_touches_survive(repo):
    edits = {PLAIN: b"answer = 43", "README.md": b"Mine.\n", "megatron/core/new.py": b"mine\n"}
    for path, content in edits.items():
        repo.write(path, content)
    (repo.root / "pretrain.py").unlink()
    before, dirt = repo.disk(), repo.dirt()
    repo.apply()
    assert {path: repo.read(path) for path in edits} == edits
    assert status(repo.tree, repo.series).edited == ()
    repo.apply()
    assert repo.restore() == Restored(CHANGED, NAMES)
    assert (repo.disk(), repo.dirt()) == (before, dirt)


def test_an_edit_of_a_file_to_be_patched_is_refused_until_it_is_committed(repo):
    repo.write(LOOP, FILES[LOOP] + b"# mine\n")
    before = repo.disk()
    with pytest.raises(EditedError, match=r"training/loop\.py.*Commit.*--force") as error:
        repo.apply()
    assert "+# mine\n" in error.value.detail
    assert repo.disk() == before
    assert repo.tree.manifest() is None
    repo.commit()
    repo.apply()
    assert repo.read(LOOP).endswith(b"# mine\n") and repo.read(LOOP) != before[Path(LOOP)][0]
    repo.restore()
    assert repo.disk() == before


@pytest.mark.parametrize("patched", [False, True])
def test_force_keeps_a_copy_of_such_an_edit(repo, patched):
    if patched:
        repo.apply()
    repo.write(LOOP, FILES[LOOP] + b"# mine\n")
    outcome = repo.restore(force=True) if patched else repo.apply(force=True)
    (copy,) = outcome.kept
    assert copy.startswith(".mqo/kept/")
    assert repo.read(copy) == FILES[LOOP] + b"# mine\n"
    repo.restore()
    assert repo.dirt() == []


def test_staged_changes_stay_staged(repo):
    repo.write(PLAIN, b"answer = 43")
    repo.write("megatron/core/new.py", b"mine\n")
    repo.git("mv", "README.md", "READ ME.md")
    repo.git("add", "--all")
    staged, dirt = repo.git("diff", "--cached"), repo.dirt()
    repo.apply()
    assert repo.git("diff", "--cached") == staged
    repo.restore()
    assert (repo.git("diff", "--cached"), repo.dirt()) == (staged, dirt)


def test_a_staged_change_of_a_file_to_be_patched_is_refused(repo):
    repo.write(LOOP, FILES[LOOP] + b"# mine\n")
    repo.git("add", "--all")
    with pytest.raises(EditedError, match=r"training/loop\.py"):
        repo.apply()
    assert repo.dirt() == [f"M  {LOOP}"]


def test_a_quant_type_set_in_the_source_is_no_edit(repo):
    repo.apply()
    repo.write(LAYERS, repo.read(LAYERS).replace(b"'none'", b"'mxfp8'"))
    assert status(repo.tree, repo.series).edited == ()
    repo.restore()
    assert repo.dirt() == []


# -- files of ours -------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["megatron/ours.py", "megatron/core/ours.py"])
def test_a_file_that_upstream_tracks_is_not_replaced_by_ours(repo, mini, tmp_path, where):
    mini.change_patch("series.toml", "megatron/ours.py", where)
    (mini.tree.root / where).write_text("def operands(*args): ...\n")
    ours = Repo(repo.root, Series.load(mini.patches, ours=mini.tree.root))
    ours.write(where, b"upstream's\n")
    ours.commit()
    assert ours.apply().not_placed == (where,)
    assert ours.read(where) == b"upstream's\n"
    assert where not in {c.path for c in diff.changes(ours.tree, ours.series, ())}
    export(ours.tree, ours.series, (), tmp_path / "patches.d", repository=mini.patches)
    assert not list((tmp_path / "patches.d").glob("*-ours.patch"))
    ours.restore()
    assert ours.read(where) == b"upstream's\n"
    assert ours.dirt() == []


def test_a_file_that_upstream_tracks_is_not_replaced_when_it_was_deleted(repo):
    repo.write("megatron/ours.py", b"upstream's\n")
    repo.commit()
    (repo.root / "megatron/ours.py").unlink()
    assert repo.apply().not_placed == ("megatron/ours.py",)
    repo.restore()
    assert repo.dirt() == [" D megatron/ours.py"]


@pytest.mark.parametrize("what", ["file", "submodule", "link"])
def test_ours_go_into_no_folder_that_upstream_has_something_else_for(repo, mini, what):
    mini.change_patch("series.toml", "megatron/ours.py", "megatron/deep/er/ours.py")
    (mini.tree.root / "megatron/deep/er").mkdir(parents=True)
    (mini.tree.root / "megatron/deep/er/ours.py").write_text("def operands(*args): ...\n")
    ours = Repo(repo.root, Series.load(mini.patches, ours=mini.tree.root))
    track(ours, what, "megatron/deep")
    assert ours.apply().not_placed == ("megatron/deep/er/ours.py",)
    ours.restore()
    assert ours.dirt() == []


def track(repo, what, path):
    """Commit a file, a submodule that is not checked out, or a link."""
    if what == "file":
        repo.write(path, b"upstream's\n")
    if what == "submodule":
        submodule(repo, path)
    if what == "link":
        (repo.root / path).symlink_to("core")
    repo.commit()


def submodule(repo, path):
    """Stage a submodule that is not checked out."""
    (repo.root / path).mkdir()
    repo.git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},{path}")


def test_an_untracked_file_in_the_place_of_ours_is_refused(repo):
    repo.write("megatron/ours.py", b"mine\n")
    with pytest.raises(EditedError, match=r"megatron/ours\.py.*Undo the change"):
        repo.apply()
    assert repo.dirt() == ["?? megatron/ours.py"]
    assert repo.read("megatron/ours.py") == b"mine\n"


# -- line endings and other filters --------------------------------------------------------------


def smudge(repo):
    """A filter that lengthens what it checks out, as LFS does."""
    repo.git("config", "filter.loud.smudge", "sed s/old/very_old/")
    repo.git("config", "filter.loud.clean", "sed s/very_old/old/")
    repo.write(".gitattributes", b"megatron/core/gadget.py filter=loud\n")


def crlf(repo):
    repo.git("config", "core.autocrlf", "true")


def attributes(repo):
    repo.write(".gitattributes", b"*.py text eol=crlf\nmegatron/core/gadget.py -text\n")


@pytest.mark.parametrize("configure", [smudge, crlf, attributes])
def test_restore_gives_what_a_checkout_gives(repo, configure):
    configure(repo)
    repo.commit("--allow-empty")
    shutil.rmtree(repo.root / "megatron")
    repo.git("checkout", "--", ".")
    before = repo.disk()
    assert repo.bytes() != FILES
    assert repo.apply() == Applied(CHANGED - (configure is smudge), NAMES)
    assert repo.disk() != before
    repo.restore()
    assert repo.disk() == before
    assert repo.dirt() == []


# -- files of every kind -------------------------------------------------------------------------


def test_files_with_names_of_every_kind_are_patched_like_any(repo):
    names = [b"two words", b"two\nlines", b"tab\t", "é∂".encode(), b"latin \xe9", b'"quoted"']
    for folder in (b"docs", b"megatron/core"):
        for name in names:
            repo.write(os.fsdecode(folder + b"/" + name + b".py"), FILES[LOOP])
    repo.commit()
    repo.apply()
    assert b"new_engine" in repo.read("megatron/core/two words.py")
    repo.restore()
    assert repo.dirt() == []


def test_links_and_submodules_do_no_harm(repo, tmp_path):
    (repo.root / "megatron/core/link.py").symlink_to("gadget.py")
    (repo.root / "megatron/core/nowhere.py").symlink_to("../old_engine")
    (repo.root / "megatron/core/more").symlink_to("../training")
    (repo.root / "examples").symlink_to("tools")
    submodule(repo, "megatron/core/sub")
    submodule(repo, "3rdparty")
    repo.git("add", "megatron", "examples")
    repo.git("commit", "-qm", "links")
    before = repo.disk()
    assert repo.dirt() == []
    assert repo.apply() == Applied(CHANGED, NAMES)
    assert {p for p in repo.disk() if repo.disk()[p] != before.get(p)} == {
        Path(line[3:]) for line in repo.dirt()
    }
    shot = snapshot(repo.tree, tmp_path / "shot", types={"fprop": "mxfp8"})
    assert b"new_engine" in shot.tree.read("megatron/core/link.py")
    repo.restore()
    assert repo.disk() == before
    assert repo.dirt() == []


def test_a_snapshot_holds_the_whole_checkout_and_no_records(repo, tmp_path):
    repo.git("worktree", "add", "-q", "-b", "other", str(tmp_path / "linked"))
    for one in (repo, Repo(tmp_path / "linked", repo.series)):
        one.apply()
        shot = snapshot(one.tree, tmp_path / f"shot of {one.root.name}")
        names = {path.name for path in shot.tree.root.rglob("*")}
        assert names.isdisjoint({".git", ".mqo"})
        assert {p: shot.tree.read(p) for p in OTHERS} == OTHERS
        assert b"new_engine" in shot.tree.read(LOOP)
        assert len(one.dirt()) == CHANGED


# -- repositories that are none ------------------------------------------------------------------

READERS = [
    lambda repo: repo.apply(),
    lambda repo: repo.restore(),
    lambda repo: status(repo.tree, repo.series),
    lambda repo: diff.changes(repo.tree, repo.series, ()),
]


def refused(repo, match):
    before = repo.disk()
    for command in READERS:
        with pytest.raises(OverlayError, match=match):
            command(repo)
    assert repo.disk() == before
    assert not (repo.root / ".mqo").exists()


def test_a_repository_without_a_commit_and_a_git_folder_that_is_none(bare):
    refused(bare, "git rev-parse .*HEAD")
    shutil.rmtree(bare.root / ".git")
    (bare.root / ".git").write_text("gitdir: /nowhere\n")
    refused(bare, "git rev-parse failed")


def test_a_repository_whose_head_holds_no_megatron(bare):
    bare.git("add", "README.md")
    bare.git("commit", "-qm", "a commit")
    before = bare.disk()
    with pytest.raises(VendorError, match="'MAJOR'"):
        bare.apply()
    assert bare.disk() == before
    assert not (bare.root / ".mqo").exists()


def test_without_git(repo, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(repo, "'git'")


def test_the_environment_of_a_git_hook_does_not_lead_elsewhere(repo, monkeypatch, tmp_path):
    other = Repo(tmp_path / "other", repo.series)
    other.write("README.md", b"Other.\n")
    other.git("init", "-q")
    other.commit()
    with monkeypatch.context() as hook:
        hook.setenv("GIT_DIR", str(other.root / ".git"))
        hook.setenv("GIT_INDEX_FILE", str(other.root / ".git/index"))
        assert repo.apply() == Applied(CHANGED, NAMES)
    repo.restore()
    assert repo.dirt() == []


# -- HEAD moves while the tree is patched --------------------------------------------------------


@pytest.fixture
def later(repo):
    """The repository with a later commit on the branch `later`, in which a file is another."""
    repo.git("checkout", "-qb", "later")
    repo.write(LOOP, b"# later\n" + FILES[LOOP])
    repo.write("megatron/core/new.py", b"import old_engine\nold_engine.stop()\n")
    repo.commit()
    repo.git("checkout", "-q", "main")
    repo.apply()
    return repo


def test_a_commit_of_other_files(repo):
    repo.apply()
    repo.write("README.md", b"Mine.\n")
    repo.write(PLAIN, b"answer = 43")
    repo.git("add", "README.md", PLAIN)
    repo.git("commit", "-qm", "other files")
    repo.apply()
    repo.restore()
    assert repo.dirt() == []
    assert repo.read(PLAIN) == b"answer = 43"


@pytest.mark.parametrize("to", ["HEAD", "later"])
def test_a_hard_reset(later, to):
    later.git("reset", "-q", "--hard", to)
    assert later.restore().changed == 1  # ours
    assert later.tree.manifest() is None
    assert later.dirt() == []


@pytest.mark.parametrize("to", ["HEAD", "later"])
def test_a_hard_reset_and_another_apply(later, to):
    later.git("reset", "-q", "--hard", to)
    assert not status(later.tree, later.series).clean
    assert later.apply().changed == 3 + (to == "later")
    assert to == "HEAD" or b"new_engine.stop" in later.read("megatron/core/new.py")
    assert status(later.tree, later.series).clean
    assert later.read(LOOP).startswith(b"# later" if to == "later" else b"def")
    later.restore()
    assert later.dirt() == []


def test_cleaned_away_files_of_ours(repo):
    repo.apply()
    repo.git("clean", "-qfd")
    assert not status(repo.tree, repo.series).clean
    repo.restore()
    assert repo.dirt() == []


def test_the_patched_tree_committed_as_a_whole(repo):
    """From then on it is what HEAD says, and no longer ours to undo."""
    repo.apply()
    repo.commit()
    assert ".mqo" not in repo.git("ls-files")
    before = repo.disk()
    repo.restore()
    assert repo.disk() == before
    assert repo.dirt() == []


def test_a_file_of_ours_that_another_commit_tracks(repo):
    repo.git("checkout", "-qb", "theirs")
    repo.write("megatron/ours.py", b"upstream's\n")
    repo.commit()
    repo.git("checkout", "-q", "main")
    repo.apply()
    repo.git("reset", "-q", "--hard", "theirs")
    assert repo.apply().not_placed == ("megatron/ours.py",)
    repo.restore()
    assert repo.read("megatron/ours.py") == b"upstream's\n"
    assert repo.dirt() == []


# -- vendor --------------------------------------------------------------------------------------


@pytest.fixture
def pin():
    return Pin(
        version="1.2.3",
        packages=("megatron/core", "megatron/training"),
        pythons=(),
        helper=Helper("", (), "", ""),
        wheels={},
    )


def test_vendor_does_not_fill_a_work_tree(repo, pin, tmp_path):
    before = repo.disk()
    with pytest.raises(VendorError, match="`mqo apply --tree`"):
        vendor(repo.tree, pin, tmp_path / "cache", source=repo.root, force=True)
    assert repo.disk() == before
    assert not (repo.root / ".mqo").exists()


def test_a_work_tree_is_a_source_for_another_tree(repo, pin, tmp_path):
    elsewhere = Tree(tmp_path / "elsewhere")
    outcome = vendor(elsewhere, pin, tmp_path / "cache", source=repo.root)
    assert outcome == Vendored("1.2.3", f"checkout {repo.root}", len(FILES))
    assert apply(elsewhere, repo.series) == Applied(CHANGED, NAMES)
    assert repo.dirt() == []
    assert repo.bytes() == FILES
    restore(elsewhere, repo.series)
    assert {path: elsewhere.read(path) for path in FILES} == FILES


def test_a_patched_work_tree_is_no_source(repo, pin, tmp_path):
    repo.apply()
    with pytest.raises(VendorError, match="mqo restore"):
        vendor(Tree(tmp_path / "elsewhere"), pin, tmp_path / "cache", source=repo.root)
