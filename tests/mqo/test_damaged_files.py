"""Files from elsewhere that commands other than the report's read: used, or refused in a paragraph.

Nothing is trained or converted: where that would begin, a command ends as it does for a failure.
"""

import json
import sys
from dataclasses import asdict

import pytest
from mqo.commands import sweep as sweeps
from mqo.errors import ConvertError
from mqo.launch import bytecode, convert, evaluation, export, machine
from mqo.perf.comparability import RECORD, read
from mqo.project import Project
from mqo.simulate import command as simulation
from mqo.sweep import local
from mqo.track import content, session

from .damage import attempt, stop
from .launch import test_convert as conversions
from .report.conftest import make_run as make_whole_run
from .sweep.conftest import program
from .track.conftest import make_run

SWEEP = ("--models", "llama32-1b", "--datasets", "wikipedia", "--modes", "bf16,FA_mxfp8")


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
    monkeypatch.setattr(convert, "call", stop)
    return folder, [("convert", "hf-to-megatron", folder, tmp_path / "made")]


@pytest.fixture
def a_checkpoint(tmp_path, monkeypatch):
    """A checkpoint's arguments and a tokenizer, and the command that makes transformers' files."""
    place = tmp_path / "sound" / "checkpoint"
    place.mkdir(parents=True)
    (place / convert.TRACKER).write_text("release")
    (place / "args.json").write_text(json.dumps(conversions.ARGS))
    words = conversions.write_tokenizer(place / "words", 250)

    def call(program, function, *rest, **options):
        if function != "describe":
            stop()
        try:
            found = json.loads((place / "args.json").read_text())
        except (OSError, ValueError):
            raise ConvertError("the program's own refusal") from None
        return {"arguments": found if isinstance(found, dict) else {}, "parser": {}}

    monkeypatch.setattr(convert, "call", call)
    target = tmp_path / "made"
    return place, [("convert", "megatron-to-hf", place, target, "--tokenizer", words)]


@pytest.fixture
def a_saved_run(tmp_path, monkeypatch):
    """A run that saved, and the commands that read how it quantized before they use its weights."""
    place = tmp_path / "sound" / "saved"
    run = make_whole_run(place, "FA_linear_mxfp8", steps=2)
    kept = (run.config, run.quant_config, run.command, run.environment)
    for path in [path for path in place.rglob("*") if path.is_file() and path not in kept]:
        path.unlink()
    run.quant_config.write_text(run.quant_config.read_text() + "[layers]\nexclude = ['qk:*']\n")
    run.checkpoints.mkdir()
    (run.checkpoints / convert.TRACKER).write_text("3")
    (run.checkpoints / "iter_0000003").mkdir()
    (run.checkpoints / "iter_0000003/metadata.json").write_text("{}")
    asked = json.loads(run.config.read_text())["quantization"]["types"]
    described = {"folder": "", "types": asked, "rows": True}

    def call(program, function, *rest, **options):
        return described if function == "describe" else stop()

    monkeypatch.setattr(evaluation, "call", call)
    monkeypatch.setattr(evaluation, "snapshot", lambda *rest, **more: None)
    monkeypatch.setattr(bytecode, "share", lambda *rest: None)
    facts = {"arguments": dict(conversions.ARGS), "parser": {}}
    monkeypatch.setattr(convert, "call", lambda *rest, **options: facts)
    packed = {"layout": "mqo", "name": "mqo", "types": {}, "left": 0, "why": None}
    monkeypatch.setattr(export, "call", lambda *rest, **options: dict(packed))
    made = tmp_path / "made"
    (tmp_path / "sound/tree/tools").mkdir(parents=True)
    (tmp_path / "sound/tree/tools/dequantize.py").touch()
    tree = ("--tree", tmp_path / "sound/tree")
    return place, [
        ("eval", place),
        ("eval", run.checkpoints, "--modes", "bf16"),
        ("generate", place, "--prompt", "w2"),
        ("export", place, made, *tree),
        ("convert", "megatron-to-hf", place, tmp_path / "made2", "--vocab-size", "250"),
    ]


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A script and a file of prompts, and the commands that read them."""
    place = tmp_path / "sound" / "texts"
    (place / "checkpoint").mkdir(parents=True)
    (place / "checkpoint" / convert.TRACKER).write_text("release")
    script = (
        Project.here().root / "script/llama32-1b/pretrain_llama32-1b_wikipedia_FA_linear_mxfp8.sh"
    )
    (place / "script.sh").write_text(script.read_text())
    (place / "prompts.txt").write_text("Once upon\n\na time\n")
    monkeypatch.setattr(evaluation, "call", stop)
    monkeypatch.setattr(simulation, "simulate", stop)
    return place, [
        ("simulate", place / "script.sh", "--device", "b200"),
        ("generate", place / "checkpoint", "--prompts", place / "prompts.txt"),
    ]


KINDS = ("a_sweep", "sent_runs", "a_record", "hf_weights", "a_checkpoint", "a_saved_run", "texts")


@pytest.mark.parametrize("seeds", [6, pytest.param(1000, marks=pytest.mark.heavy)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_no_traceback(kind, seeds, request, command_line):
    place, commands = request.getfixturevalue(kind)
    each = 2 if kind == "a_saved_run" else None
    found = attempt(command_line, place, commands, range(seeds), each=each)
    assert found and (seeds == 6 or ((2, False) in found and len(found) > 1))
