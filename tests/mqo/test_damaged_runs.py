"""Run folders of somebody else, or of a broken disk: every command that reads them compares, draws
or replays them, leaves them out, or ends in one paragraph.
"""

import json
import random
import shutil

import pytest
from mqo.errors import RunError
from mqo.launch import rerun

from .damage import damage
from .report.conftest import make_run

pytest.importorskip("matplotlib")
pytest.importorskip("plotly")
ALLOWED = {0, 1, 2}  # a replay that differs, and a verdict that fails, are 1
TRIED = "the run would be replayed here"


@pytest.fixture
def sound(tmp_path):
    """A folder of two runs, the second of which is damaged in tests."""
    root = tmp_path / "sound"
    for name, mode in (("one", "bf16"), ("other", "mxfp4")):
        run = make_run(root / name, mode, steps=20)
        (run.source / "pretrain_gpt.py").write_text("")
        facts = json.loads(run.environment.read_text())
        facts["inputs"]["files"] = {}
        run.environment.write_text(json.dumps(facts))
    return root


def try_runs(command_line, sound, place, seeds):
    """Damage a file of a run for each seed, and let every command read it."""
    codes = set()
    for seed in seeds:
        draw = random.Random(seed)
        shutil.copytree(sound, place)
        run = place / "other"
        damage(draw, draw.choice(sorted(path for path in run.rglob("*") if path.is_file())))
        for words in (
            ("report", place, "-o", place / "report"),
            ("plot", run, "-o", place / "loss.png"),
            ("plot", run, "--operands", "-o", place / "operands.png"),
            ("perf", "--compare", place / "one", run),
            ("rerun", run, "--allow-versions"),
        ):
            code, _, err = command_line(*words)
            assert code in ALLOWED, (seed, words)
            assert code != 2 or err.startswith("mqo: "), (seed, words, err)
            codes.add((words[0], code, TRIED in err))
        shutil.rmtree(place)
    return codes


@pytest.fixture
def no_training(monkeypatch, tmp_path):
    """A replay that ends where its training would begin, and has its folder in the test's place."""

    def refuse(*rest):
        raise RunError(TRIED)

    create = rerun.create
    monkeypatch.setattr(rerun, "train", refuse)
    monkeypatch.setattr(rerun, "create", lambda runs, title: create(tmp_path / "replays", title))


def test_a_damaged_run_is_no_traceback(command_line, sound, tmp_path, no_training):
    codes = try_runs(command_line, sound, tmp_path / "runs", range(12))
    assert {("report", 0, False), ("plot", 0, False), ("plot", 2, False)} <= codes


@pytest.mark.heavy
def test_none_of_many_damaged_runs_is_a_traceback(command_line, sound, tmp_path, no_training):
    codes = try_runs(command_line, sound, tmp_path / "runs", range(1000))
    assert ("rerun", 2, True) in codes and ("rerun", 2, False) in codes
