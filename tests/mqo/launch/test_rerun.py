"""What a replay refuses, what it changes in the command, and how it compares."""

import json
import sys
from pathlib import Path

import pytest
from mqo.errors import RunError
from mqo.launch import rerun as program
from mqo.launch.command import from_shell
from mqo.launch.config import Cluster, resolve
from mqo.launch.folder import create, write_facts
from mqo.launch.origin import sign
from mqo.launch.rerun import BitEqual, Differs, compare, redirected, rerun
from mqo.project import Project
from mqo.runs import RunFolder

CONFIG = resolve("llama32-1b", "wikipedia", "bf16", "tiny")
LOSSES = [(1, "lm loss", 8.0), (2, "lm loss", "nan"), (2, "lm loss validation", 7.5)]

# What trains: losses as they were, or as the variable says.
TRAIN = """
import json, os, pathlib, sys
here = pathlib.Path(sys.argv[1]).parent
assert sys.argv[2:4] == ["--data-path", os.environ["DATA"]], sys.argv
for iteration, name, value in json.loads(os.environ["LOSSES"]):
    with open(here / "metrics.jsonl", "a") as lines:
        lines.write(json.dumps({"iteration": iteration, "name": name, "value": value}) + "\\n")
"""


def write_losses(run, losses):
    rows = [json.dumps({"iteration": i, "name": n, "value": v}) + "\n" for i, n, v in losses]
    run.metrics.write_text("".join(rows))


@pytest.fixture
def original(tmp_path, monkeypatch):
    """A run folder as the launcher leaves one, of a program of our own."""
    monkeypatch.setattr(Project, "runs", tmp_path / "runs")
    run = create(tmp_path / "old runs", CONFIG.title)
    run.source.mkdir()
    (run.source / "pretrain_gpt.py").write_text("")
    (run.source / "train.py").write_text(TRAIN)
    run.quant_config.write_text("")
    write_losses(run, LOSSES)
    prefix = tmp_path / "corpus"
    for ending in ("bin", "idx"):
        (tmp_path / f"corpus.{ending}").write_text("tokens")
    command = [sys.executable, str(run.source / "train.py"), str(run.source)]
    command += ["--data-path", str(prefix), "--save", str(run.checkpoints)]
    write_facts(run, CONFIG, command, {"DATA": str(prefix), "LOSSES": json.dumps(LOSSES)})
    sign(Project.here(), run)
    return run


def replay(run, **rest):
    return rerun(Project.here(), run, report=lambda text: None, **rest)


def edit_environment(run, **changes):
    facts = json.loads(run.environment.read_text())
    run.environment.write_text(json.dumps(facts | changes))


def test_a_replay_has_a_folder_of_its_own(original, tmp_path):
    found = replay(original)
    assert found == BitEqual(found.run, 2)
    assert found.line() == "bit-equal, 2 steps"
    again = RunFolder(tmp_path / "runs" / found.run)
    assert again.root.parent == tmp_path / "runs"
    command, _ = from_shell(again.command.read_text())
    assert str(original.root) not in " ".join(command)
    assert (again.source / "train.py").read_text() == TRAIN
    assert not original.log.exists()
    assert isinstance(replay(again), BitEqual)  # as the original can


@pytest.mark.parametrize(
    ("row", "value", "text"),
    [
        (0, 8.000000000000002, "differs at step 1: lm loss was 8.000000000000002, and is 8.0"),
        (1, 8.0, "differs at step 2: lm loss was 8.0, and is nan"),
        (2, 7.25, "differs at step 2: lm loss validation was 7.25, and is 7.5"),
    ],
)
def test_a_metrics_row_that_was_changed_is_found(original, row, value, text):
    losses = [(i, n, value if k == row else v) for k, (i, n, v) in enumerate(LOSSES)]
    write_losses(original, losses)
    assert replay(original).line() == text


@pytest.mark.parametrize(
    ("losses", "step", "was", "now"),
    [
        (LOSSES[:1], 2, "nan", None),
        ([(1, "lm loss", 8.0), (3, "lm loss", 7.0)], 2, "nan", None),
    ],
)
def test_a_step_that_is_missing_is_a_difference(tmp_path, losses, step, was, now):
    runs = [RunFolder(tmp_path / name) for name in "ab"]
    for run, rows in zip(runs, (LOSSES, losses), strict=True):
        run.root.mkdir()
        write_losses(run, rows)
    found = compare(*runs)
    assert (found.metric, found.step, str(found.was), found.now) == ("lm loss", step, was, now)
    assert isinstance(found, Differs)


def test_a_killed_original_is_compared_as_far_as_it_got(tmp_path):
    runs = [RunFolder(tmp_path / name) for name in "ab"]
    for run, rows in zip(runs, (LOSSES[:1], LOSSES), strict=True):
        run.root.mkdir()
        write_losses(run, rows)
    assert compare(*runs) == BitEqual(str(runs[1].root), 1)


def test_a_student_is_compared_by_what_it_learnt_from(tmp_path):
    runs = [RunFolder(tmp_path / name) for name in "abc"]
    for run, first in zip(runs, (8.0, 8.0, 9.0), strict=True):
        run.root.mkdir()
        write_losses(run, [(1, "kd loss", first), (2, "kd loss", 7.0)])
    assert compare(*runs[:2]) == BitEqual(str(runs[1].root), 2)
    assert compare(runs[0], runs[2]).metric == "kd loss"


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["source/pretrain_gpt.py", "command.sh", "environment.json"])
def test_a_folder_that_lacks_something_is_refused(original, name):
    (original.root / name).unlink()
    with pytest.raises(RunError, match=rf"lacks {name}"):
        replay(original)


def test_no_folder_at_all_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"nowhere lacks source/pretrain_gpt\.py, command\.sh"):
        replay(RunFolder(tmp_path / "nowhere"))


def test_a_run_without_losses_is_refused(original):
    original.metrics.write_text("")
    with pytest.raises(RunError, match=rf"{original.root} .*loss.*metrics\.jsonl"):
        replay(original)


def test_one_node_of_several_is_refused(original):
    cell = resolve("llama32-1b", "wikipedia", "bf16", "tiny", cluster=Cluster(nnodes=2))
    original.config.write_text(cell.model_dump_json())
    with pytest.raises(RunError, match=f"{original.root} .*2 nodes"):
        replay(original)


def test_data_that_changed_or_is_gone_is_refused(original, tmp_path):
    (tmp_path / "corpus.bin").write_text("tokenS")
    (tmp_path / "corpus.idx").unlink()
    changes = r"corpus\.bin has changed; .*corpus\.idx is gone"
    with pytest.raises(RunError, match=changes + ".*`mqo setup --dataset wikipedia`"):
        replay(original)
    assert not (tmp_path / "runs").exists()


def test_a_run_that_noted_no_data_is_refused(original):
    facts = json.loads(original.environment.read_text())
    del facts["inputs"]
    original.environment.write_text(json.dumps(facts))
    with pytest.raises(RunError, match=f"{original.environment} .*inputs"):
        replay(original)


def test_other_versions_are_named_and_may_be_allowed(original):
    packages = dict(program.packages()) | {"torch": "1.0", "gone": "2"}
    del packages["numpy"]
    edit_environment(original, packages=packages)
    with pytest.raises(RunError, match=r": gone 2 is now gone, torch 1\.0"):
        replay(original)
    said = []
    found = rerun(Project.here(), original, allow_versions=True, report=said.append)
    assert isinstance(found, BitEqual)
    assert "numpy missing is now" in said[0]  # what was not there was not loaded
    assert "torch 1.0 is now" in said[1]


# What a run that loaded only torch lists as installed: the name of a package, and its version.
FOREIGN = {
    "appeared": ("numpy", None),
    "disappeared": ("no_such_package", "6.0"),
    "changed": ("numpy", "1.0"),
}


@pytest.mark.parametrize(("name", "version"), FOREIGN.values(), ids=FOREIGN)
def test_a_package_that_the_run_did_not_load_may_differ(original, name, version):
    packages = dict(program.packages())
    original.packages.write_text(json.dumps({"torch": packages["torch"]}))
    if version is None:
        del packages[name]
    else:
        packages[name] = version
    edit_environment(original, packages=packages)
    said = []
    found = rerun(Project.here(), original, report=said.append)
    assert isinstance(found, BitEqual)
    assert f"{name} {version or 'missing'} is now" in said[0]


@pytest.mark.parametrize(("was", "now"), [("1.0", "2.13"), ("1.0", None)])
def test_a_package_that_the_run_loaded_may_not_differ(original, monkeypatch, was, now):
    original.packages.write_text(json.dumps({"wheel_of_cuda": was}))
    edit_environment(original, packages=dict(program.packages()) | {"wheel_of_cuda": was})
    there = dict(program.packages()) | ({"wheel_of_cuda": now} if now else {})
    monkeypatch.setattr(program, "packages", lambda: there)
    with pytest.raises(RunError, match=rf"wheel_of_cuda 1\.0 is now {now or 'gone'}"):
        replay(original)


def test_another_python_is_refused_whatever_was_loaded(original):
    original.packages.write_text("{}")
    edit_environment(original, python="3.9")
    with pytest.raises(RunError, match=r"Python 3\.9 is now"):
        replay(original)


def test_a_package_that_only_the_rerun_loaded_is_named(original):
    """Megatron takes some packages if they are there."""
    was, now = {"torch": "2"}, {"torch": "2", "apex": "0.1"}
    again = create(original.root.parent, "again")
    original.packages.write_text(json.dumps(was))
    again.packages.write_text(json.dumps(now))
    said = []
    program._note_additional(original, again, said.append)
    program._note_additional(again, original, said.append)
    assert len(said) == 1 and "apex" in said[0]


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("iteration", "expected"),
    [
        (None, []),
        ("4", ["--load", "/c", "--ckpt-step", "4"]),
        ("release", ["--load", "/c"]),
    ],
)
def test_a_replay_goes_on_from_what_the_original_found_and_saves_elsewhere(iteration, expected):
    command = ["py", "p", "--save", "/c", "--load", "/c", "--tensorboard-dir", "/t", "--lr", "1"]
    folder = RunFolder(program.Path("/new"))
    assert redirected(command, folder, iteration) == [
        *(sys.executable, "p", "--lr", "1", *expected),
        *("--save", "/new/checkpoints", "--tensorboard-dir", "/new/tensorboard"),
    ]
    joined = ["py", "p", "--save=/c", "--load=/c", "--tensorboard-dir=/t", "--lr", "1"]
    assert redirected(joined, folder, iteration) == redirected(command, folder, iteration)
    assert "--save" not in redirected(["py", "p"], folder, iteration=None)


def test_a_foreign_run_is_rerun_only_if_it_is_trusted(original, tmp_path):
    """Its command names a program of its own, which must not start."""
    marker = tmp_path / "it ran"
    (original.source / "train.py").write_text(f"open({str(marker)!r}, 'w')\n{TRAIN}")
    with pytest.raises(RunError, match="--trust"):
        replay(original)
    assert not marker.exists()
    found = replay(original, trust=True)
    assert isinstance(found, BitEqual) and marker.exists()
    assert not RunFolder(Path(found.run)).origin.exists()


def test_a_rerun_of_ones_own_run_is_ones_own(original):
    assert RunFolder(Path(replay(original).run)).origin.is_file()
