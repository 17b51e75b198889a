import json

import pytest
from mqo.project import Project

from ...conftest import contents, materialize
from ..conftest import GEMMS, PLAIN, release

pytestmark = pytest.mark.slow

RELEASES = ["0.10.0", "0.11.0", "0.12.3", "0.13.1", "0.14.0"]
RELEASES += ["0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2"]


@pytest.fixture
def run(command_line):
    """A function that runs `mqo verify`: its exit code, its output and its errors."""

    def run(*words):
        return command_line("verify", *words)

    return run


@pytest.fixture
def here(trial, monkeypatch):
    """The small project, as the one that the command belongs to."""
    monkeypatch.setattr(Project, "here", classmethod(lambda cls: trial.project))
    return trial


def releases(out):
    """The versions over the table's columns."""
    return out.splitlines()[0].split()


def forward_row(out):
    (row,) = (line for line in out.splitlines() if line.startswith("forward pass"))
    return row.removeprefix("forward pass").split()


# -- which releases ----------------------------------------------------------------------------


def test_the_pinned_release_by_default(run, here):
    code, out, err = run()
    assert (code, releases(out)) == (0, ["1.2"])
    assert "verifying 1.2.3" in err


def test_the_releases_that_are_named_each_once(run, here):
    code, out, _ = run("--version", "1.2.3", "--version", "1.1.0", "--version", "1.2.3")
    assert (code, releases(out)) == (0, ["1.2", "1.1"])


def test_an_unknown_release_lists_the_known_ones_before_anything_is_tried(run, here):
    code, out, err = run("--version", "1.2.3", "--version", "9.9")
    assert (code, out) == (2, "")
    assert err.startswith("mqo: There is no megatron-core release in UPSTREAM.toml called '9.9'")
    assert "one of 1.1.0, 1.2.3" in err


def test_all_and_a_version_exclude_each_other(run, here):
    code, out, _ = run("--all", "--version", "1.1.0")
    assert (code, out) == (2, "")


# -- exit codes --------------------------------------------------------------------------------


def test_a_release_that_is_not_green_is_exit_code_1_and_the_others_are_tried(run, here):
    here.change("patches/series.toml", 'supported = ">=1,<2"', 'supported = ">=1.2,<2"')
    code, out, _ = run("--all")
    assert code == 1
    assert forward_row(out) == ["run", "run"]
    assert "\nNOT green: 1.1.0\n" in out
    assert "1.1.0: 1.1.0 is outside `supported`" in out


def test_an_error_weighs_more_than_a_release_that_is_not_green(run, here):
    here.drop_wheel("1.1.0")
    here.change("patches/quant_sites.py", "left @ right", "left @ rights")
    code, out, _ = run("--all")
    assert code == 2
    assert forward_row(out) == ["?", "?"]
    assert "\nNOT green: 1.1.0, 1.2.3\n" in out
    assert "1.1.0: pip could not download megatron-core==1.1.0" in out
    assert "1.2.3: quant_sites drifted: " in out


# -- JSON --------------------------------------------------------------------------------------


def test_json_says_all_of_it_and_nothing_else_is_on_stdout(run, here):
    here.change("patches/quant_sites.py", "left @ right", "left @ rights")
    code, out, _ = run("--json", "--all")
    old, pinned = json.loads(out)["releases"]
    assert code == 1
    assert (old["version"], old["pinned"], old["green"]) == ("1.1.0", False, False)
    assert (pinned["version"], pinned["pinned"], pinned["forward"]) == ("1.2.3", True, "not tried")
    assert [(e["name"], e["outcome"], e["files"]) for e in pinned["entries"]] == [
        ("ours", "applied", 1),
        ("quant_sites", "drifted", 0),
        ("new_engine", "applied", 1),
    ]
    assert "nearest" in pinned["entries"][1]["why"]


# -- the repository's series -------------------------------------------------------------------


def test_the_series_is_green_on_the_vendored_release(run):
    code, out, err = run()
    assert code == 0, out + err
    assert out.endswith("all green\n")
    assert forward_row(out) == ["run"]


@pytest.mark.heavy
def test_the_series_is_green_on_every_release(run):
    """Two minutes, and ten downloads the first time."""
    pytest.importorskip("torch")
    code, out, err = run("--all", "--json")
    results = {result["version"]: result for result in json.loads(out)["releases"]}
    assert list(results) == RELEASES
    assert {v: r for v, r in results.items() if not r["green"]} == {}, err
    assert code == 0
    assert {result["forward"] for result in results.values()} == {"run"}
    for version, result in results.items():
        outcomes = {entry["name"]: entry["outcome"] for entry in result["entries"]}
        # The trainer comes with the wheels since 0.17; old releases lack what some entries change.
        trainer = tuple(map(int, version.split("."))) >= (0, 17)
        assert outcomes["run_hooks"] == ("applied" if trainer else "not needed")
        assert outcomes["quant_sites"] == outcomes["portable_device"] == "applied"
        assert set(outcomes.values()) <= {"applied", "not needed"}


# -- a tree of one's own -----------------------------------------------------------------------


def test_a_trees_upstream_files_are_tried_and_the_tree_is_only_read(run, here, tmp_path):
    tree = materialize(tmp_path / "theirs", release("1.1.0"), version="1.1.0")
    (tree.root / PLAIN).write_bytes(b"edited = True\n")
    before = contents(tree.root)
    code, out, err = run("--tree", str(tree.root))
    assert (code, releases(out)) == (0, ["1.1"])
    assert "verifying 1.1.0, from wheel of our own" in err
    assert contents(tree.root) == before


def test_a_tree_that_the_series_does_not_fit_is_exit_code_1(run, here, tmp_path):
    files = {**release("1.1.0"), GEMMS: b"import os\n"}
    tree = materialize(tmp_path / "theirs", files, version="1.1.0")
    code, out, _ = run("--tree", str(tree.root))
    assert code == 1
    assert "1.1.0: quant_sites drifted: " in out


def test_trees_and_releases_are_tried_together(run, here, tmp_path):
    for version in ("1.0.0", "1.3.0"):
        materialize(tmp_path / version, release(version), version=version)
    words = ["--tree", str(tmp_path / "1.0.0"), "--tree", str(tmp_path / "1.3.0")]
    assert releases(run("--all", *words)[1]) == ["1.1", "1.2", "1.0", "1.3"]
    assert releases(run("--version", "1.1.0", *words[:2])[1]) == ["1.1", "1.0"]


def test_a_tree_that_is_none_is_an_error_before_anything_is_tried(run, here, tmp_path):
    code, out, err = run("--all", "--tree", str(tmp_path))
    assert (code, out) == (2, "")
    assert err == (
        f"mqo: {tmp_path} holds no vendored Megatron. Expected: megatron/core and "
        "megatron/training from the pinned wheel, or a git work tree of Megatron-LM. "
        "Run `mqo vendor`.\n"
    )
