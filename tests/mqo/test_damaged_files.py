"""Files from elsewhere that commands other than the report's read: used, or refused in a paragraph.

Nothing is trained or converted: where that would begin, a command ends as it does for a failure.
"""

import json
import random
import shutil
import sys
from dataclasses import asdict

import pytest
from mqo.errors import ConvertError, RunError
from mqo.launch import convert, machine
from mqo.perf.comparability import RECORD, read
from mqo.sweep import cli as sweeps
from mqo.sweep import local
from mqo.track import content, session

from .damage import damage
from .launch import test_convert as conversions
from .report.conftest import make_run as make_whole_run
from .sweep.conftest import program
from .track.conftest import make_run

SWEEP = ("--models", "llama32-1b", "--datasets", "wikipedia", "--modes", "bf16,FA_mxfp8")
BEGUN = "the work would begin here"


def stop(*rest, **options):
    raise RunError(BEGUN)


@pytest.fixture
def a_sweep(tmp_path, monkeypatch, command_line):
    """The folder of a sweep that ended, and the command that continues it."""
    place = tmp_path / "sound" / "a sweep"
    monkeypatch.setattr(machine, "detect", lambda: machine.Machine(2, 0))
    monkeypatch.setattr(sweeps, "prepare", lambda project, asked: None)
    job = [sys.executable, "-c", program()]
    monkeypatch.setattr(local, "command", lambda run, *rest: [*job, str(run.root)])
    assert command_line("sweep", *SWEEP, "-o", place)[0] == 0
    monkeypatch.setattr(sweeps, "prepare", stop)
    return place, [("sweep", *SWEEP, "-o", place)]


@pytest.fixture
def sent_runs(tmp_path, monkeypatch):
    """A run that a tracker has, and the command that sends the rest."""

    class Tracker:
        def open(self, run, before):
            return before

        attach = picture = log = create = stop

    monkeypatch.setitem(session.TRACKERS, "mlflow", Tracker)
    monkeypatch.setattr(session, "check", lambda name: None)
    run = make_run(tmp_path / "sound" / "sent")
    rows = sum(1 for _ in content.values(session.MetricsTail(run.metrics).rows()))
    table = {"mlflow": {"id": "m", "rows": rows, "status": "finished"}}
    run.trackers.write_text(json.dumps(table))
    return run.root, [("track", run.root, "--tracker", "mlflow")]


@pytest.fixture
def a_record(tmp_path):
    """What `mqo perf` wrote, and the command that compares it."""
    pytest.importorskip("plotly")
    place = tmp_path / "sound" / "perf"
    place.mkdir(parents=True)
    whole = read(make_whole_run(tmp_path / "whole", "bf16", steps=20).root)
    for name in ("one", "other"):
        (place / name).mkdir()
        (place / name / RECORD).write_text(json.dumps({"timed": asdict(whole)}))
    return place, [("perf", "--compare", place / "one", place / "other")]


@pytest.fixture
def hf_weights(tmp_path, monkeypatch):
    """A folder of transformers, and the commands that read it before a program loads weights."""
    (tmp_path / "sound").mkdir()
    folder = conversions.write_tokenizer(tmp_path / "sound" / "hf", 250)
    shape = convert.shape_of_args(conversions.ARGS)
    config = convert.config_of(shape, "bf16", 128) | {"eos_token_id": 7}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(convert, "run_program", stop)
    return folder, [("convert", "hf-to-megatron", folder, tmp_path / "made")]


@pytest.fixture
def a_checkpoint(tmp_path, monkeypatch):
    """A checkpoint's arguments and a tokenizer, and the command that makes transformers' files."""
    place = tmp_path / "sound" / "checkpoint"
    place.mkdir(parents=True)
    (place / convert.TRACKER).write_text("release")
    (place / "args.json").write_text(json.dumps(conversions.ARGS))
    words = conversions.write_tokenizer(place / "words", 250)

    def describe(tree, checkpoint):
        try:
            found = json.loads((place / "args.json").read_text())
        except (OSError, ValueError):
            raise ConvertError("the program's own refusal") from None
        return found if isinstance(found, dict) else {}

    monkeypatch.setattr(convert, "describe", describe)
    monkeypatch.setattr(convert, "run_program", stop)
    target = tmp_path / "made"
    return place, [("convert", "megatron-to-hf", place, target, "--tokenizer", words)]


@pytest.fixture
def a_corpus(tmp_path):
    """Documents and a tokenizer, and the command that makes an index."""
    place = tmp_path / "sound" / "corpus"
    place.mkdir(parents=True)
    words = conversions.write_tokenizer(place / "words", 250)
    lines = [json.dumps({"text": f"w{n} w{n + 1}"}) for n in range(4)]
    (place / "a.jsonl").write_text("\n".join(lines) + "\n")
    rest = ("--tokenizer", words, "--workers", "1", "--output", tmp_path / "made")
    return place, [("data", "prepare", "jsonl", "--input", place / "a.jsonl", *rest)]


KINDS = ("a_sweep", "sent_runs", "a_record", "hf_weights", "a_checkpoint", "a_corpus")


def attempt(command_line, place, commands, seeds):
    """The exit codes of the commands on `place`, with one of its files damaged for each seed."""
    codes = set()
    sound = place.with_name("untouched")
    shutil.copytree(place, sound)
    made = place.parent.parent
    for seed in seeds:
        draw = random.Random(seed)
        damage(draw, draw.choice(sorted(path for path in place.rglob("*") if path.is_file())))
        for words in commands:
            code, _, err = command_line(*words)
            assert code in (0, 1, 2), (seed, words)
            assert code != 2 or "mqo: " in err, (seed, words, err)
            codes.add((code, BEGUN in err))
        shutil.rmtree(place)
        shutil.copytree(sound, place)
        for left in made.glob("made*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    return codes


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_no_traceback(kind, request, command_line):
    codes = attempt(command_line, *request.getfixturevalue(kind), range(25))
    assert (2, False) in codes and len(codes) > 1


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_none_of_many_damaged_files_is_a_traceback(kind, request, command_line):
    codes = attempt(command_line, *request.getfixturevalue(kind), range(1000))
    assert (2, False) in codes and len(codes) > 1
