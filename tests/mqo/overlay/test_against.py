import json
import subprocess
import sys

import pytest
from mqo.errors import OverlayError, UnknownNameError
from mqo.overlay import against
from mqo.overlay.pin import Pin
from mqo.project import Project

from .conftest import commit_all, git
from .quant_types.lookalike import write

HERE = Project.here()
PIN = Pin.load(HERE.upstream_pin)
EXPECTED = {
    "megatron/core/layers.py": b"a = 1\nb = 2\n",
    "megatron/core/gone.py": b"x = 1\n",
    "megatron/core/same.py": b"same = 1\n",
    "megatron/core/helpers.so": b"\0",
    "megatron/training/loop.py": b"y = 1\n",
}
FORK = {
    "megatron/core/layers.py": b"a = 1\nb = 3\nc = 4\n",
    "megatron/core/new.py": b"z = 1\n",
    "megatron/core/same.py": b"same = 1\n",
    "megatron/core/notes.txt": b"not compared\n",
    "pretrain.py": b"not compared\n",
}


@pytest.fixture
def fork(tmp_path):
    return write(tmp_path / "a fork", FORK)


def test_changed_new_and_missing_files_differ(fork):
    found = against.differences(fork, EXPECTED)
    assert [(diff.path, diff.added, diff.removed) for diff in found] == [
        ("megatron/core/gone.py", 0, 1),
        ("megatron/core/layers.py", 2, 1),
        ("megatron/core/new.py", 1, 0),
    ]
    assert "+b = 3\n+c = 4\n" in found[1].text


def test_a_package_that_the_tree_has_is_compared(fork):
    write(fork, {"megatron/training/loop.py": b"y = 2\n"})
    paths = [diff.path for diff in against.differences(fork, EXPECTED)]
    assert "megatron/training/loop.py" in paths


def test_the_diffs_make_the_fork_of_the_release(fork, tmp_path):
    release = write(tmp_path / "release", EXPECTED)
    patch = b"".join(diff.content for diff in against.differences(fork, EXPECTED))
    subprocess.run(["git", "apply", "-"], cwd=release, input=patch, check=True)
    for path, content in FORK.items():
        if path.endswith(".py") and path.startswith("megatron"):
            assert (release / path).read_bytes() == content
    assert not (release / "megatron/core/gone.py").exists()


def test_stat_prints_counts_and_totals(fork):
    text = list(against.lines(against.differences(fork, EXPECTED), "1.2.3", stat=True))
    assert text == [
        "#   megatron/core/gone.py  +0 -1",
        "#   megatron/core/layers.py  +2 -1",
        "#   megatron/core/new.py  +1 -0",
        "# compared with 1.2.3: 3 files differ, +3 -2",
    ]


def test_a_folder_without_megatron_is_refused(tmp_path):
    with pytest.raises(OverlayError):
        against.differences(tmp_path, EXPECTED)


def named(root, name):
    return against.contents(root, name, PIN, HERE.cache, pytest.fail)


@pytest.mark.parametrize("name", ["9.9", "core_v9", "--output=x"])
def test_an_unknown_release_names_those_that_there_are(fork, name):
    with pytest.raises(UnknownNameError, match=PIN.version):
        named(fork, name)


@pytest.mark.usefixtures("plain_git")
def test_a_tag_of_a_git_work_tree_is_compared(fork):
    commit_all(fork)
    git(fork, "tag", "core_v1")
    write(fork, {"megatron/core/same.py": b"same = 2\n"})
    commit_all(fork)
    (diff,) = against.differences(fork, named(fork, "core_v1"))
    assert (diff.path, diff.added, diff.removed) == ("megatron/core/same.py", 1, 1)
    assert against.differences(fork, named(fork, "HEAD")) == []
    with pytest.raises(OverlayError):
        named(fork, "core_v2")
    with pytest.raises(UnknownNameError):
        named(fork, "--output=x")


def mqo(*words):
    command = [sys.executable, "-m", "mqo", "diff", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=HERE.root)


@pytest.mark.usefixtures("plain_git")
def test_a_git_work_tree_without_changes_hints_at_against(fork):
    write(fork, {"megatron/core/package_info.py": b"MAJOR = 0\nMINOR = 15\nPATCH = 0\n"})
    commit_all(fork)
    done = mqo("--tree", fork)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--against" in done.stdout


def test_the_patched_files_of_the_project_differ_from_its_release(vendored):
    done = mqo("--against", PIN.version, "--json")
    assert done.returncode == 1, done.stderr
    changed = {change["path"] for change in json.loads(done.stdout)["changes"]}
    patched = {path for path in vendored.manifest().files if path.endswith(".py")}
    assert {path for path in patched if path.startswith(against.PACKAGES)} <= changed


@pytest.mark.parametrize("words", [("quant_sites",), ("--all",), ("--export", "x")])
def test_it_is_not_combined_with_patches(words):
    done = mqo(*words, "--against", PIN.version)
    assert (done.returncode, done.stdout) == (2, "")
