"""Commands that read a run, a recipe or a file with custom quantizers do not run their code.

The files make a marker when they are run, or imported: the one that the user wrote, and its copy in
the run's folder. No process is started: where one would be, a command ends as for a failure. What
the processes do is in tests/test_plugin_training.py.
"""

import json
import sys
from dataclasses import replace

import pytest
import typer
from mqo import cli, process
from mqo.launch import rerun
from mqo.launch.config import RunConfig, resolve
from mqo.launch.plugins import copy_files
from mqo.project import Project
from mqo.quant.plugins import PLUGINS
from mqo.recipes.quantizers import declare_file
from mqo.report import pictures
from mqo.report.collect import collect
from mqo.report.compare import compare
from mqo.sweep import local
from mqo.track import session

from .damage import BEGUN, stop
from .report.conftest import make_run

pytest.importorskip("matplotlib")
pytest.importorskip("plotly")

# {command: (its options, whether it ends where it would start a process)}. None: it may end before.
READING = {
    "compare": ("run other", False),
    "convert finalize": ("checkpoints made", None),
    "convert megatron-to-hf": ("checkpoints made", None),
    "coverage": ("--model llama32-1b --mode linear_mine --plugin mine.py", True),
    "coverage ": ("--model llama32-1b --recipe own.toml", True),
    "eval": ("run", None),
    "export": ("run made", None),
    "generate": ("run --prompt a", None),
    "matrix list": ("", False),
    "plugin list": ("", False),
    "perf": ("--compare run other", False),
    "plot": ("run other -o made.png", False),
    "plot ": ("run --operands -o made.png", False),
    "recipe show": ("own.toml", False),
    "recipe show ": ("own.toml --toml", False),
    "report": ("run other -o made", False),
    "report ": (". -o made --latex", False),
    "rerun": ("run", None),
    "runs show": ("run", False),
    "runs rm": ("run other --yes", False),
    "sensitivity": ("run --mode mine --plugin mine.py -o made.png", None),
    "sensitivity ": ("run --recipe own.toml -o made.png", None),
    "sweep": (
        "--modes FA_mine --plugin mine.py --models llama32-1b --datasets wikipedia -o made",
        True,
    ),
    "sweep ": (
        "--modes bf16 --recipes own.toml --models llama32-1b --datasets wikipedia -o made",
        None,
    ),
    "track": ("run --tracker mlflow", None),
    "train": ("--quantization linear_mine --plugin mine.py --list", False),
    "train ": (
        "--quantization linear_mine --plugin mine.py --model llama32-1b --dataset wikipedia "
        "--training-config tiny",
        True,
    ),
}
# Commands that are given none of them.
OTHERS = {
    *("adopt", "apply", "data prepare", "diff", "doctor", "matrix generate", "restore", "setup"),
    *("demo", "snapshot", "stats", "status", "vendor", "verify", "convert hf-to-megatron"),
    *("recipe list", "plugin new", "simulate", "formats list", "formats check"),
}
# Commands that run it, in a process of its own, as the user wants.
RUNNING = {"plugin check"}


def text(marker, declared):
    """A file of a quantizer that must not be run."""
    return (
        f"open({str(marker)!r}, 'w')\nimport helper\nfrom mqo.quant import quantizer\n"
        f"@quantizer('mine'{declared})\ndef mine(x, context):\n    return x\n"
    )


def make_plugin_run(place, name, declared, marker, option):
    """A run whose linear layers are quantized by a file of its own."""
    folder = place / f"files of {name}"
    folder.mkdir()
    file = folder / "mine.py"
    file.write_text(text(marker, declared))
    (folder / "helper.py").write_text(f"open({str(marker)!r}, 'w')\n")
    declare_file(file)
    run = make_run(place / name, "linear_mine", steps=20)
    flags = RunConfig.read(run).experiment.extra_flags
    names = ("llama32-1b", "wikipedia", "linear_mine", "smoke")
    config = resolve(*names, plugins=[file], plugin_options=[option], extra_flags=flags)
    copy_files(config.quantization.plugins, run)
    config.write(run)
    run.quant_config.write_text(config.quant_toml(config.quantization.types))
    (run.source / "pretrain_gpt.py").write_text(f"open({str(marker)!r}, 'w')\n")
    run.checkpoints.mkdir()
    facts = json.loads(run.environment.read_text())
    run.environment.write_text(json.dumps(facts | {"inputs": {"files": {}}}))
    return file


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with two runs, a file of quantizers and a recipe, which is the current one.

    The quantizers of the runs have one name, and other arguments and options.
    """
    place, marker, before = tmp_path / "place", tmp_path / "it ran", {*sys.modules}
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setattr(process, "spawn", stop)
    monkeypatch.setattr(local.Local, "start", stop)
    monkeypatch.setattr(rerun, "train", stop)
    monkeypatch.setitem(session.TRACKERS, "mlflow", type("Tracker", (), {"open": stop}))
    monkeypatch.setattr(session, "check", lambda name: None)
    monkeypatch.setattr(pictures, "FORMATS", ("png",))
    here = Project.here()
    chosen = classmethod(lambda cls, runs=None: replace(here, chosen_runs=runs or place / "runs"))
    monkeypatch.setattr(Project, "here", chosen)
    make_plugin_run(place, "other", ", stochastic=True, options={'n': 1}", marker, "mine.n=2")
    PLUGINS.clear()
    file = make_plugin_run(place, "run", ", block=32, options={'gain': 2.0}", marker, "mine.gain=3")
    (place / "checkpoints").symlink_to(place / "run/checkpoints")
    for name in ("mine.py", "helper.py"):
        (place / name).write_text((file.parent / name).read_text())
    (place / "own.toml").write_text('types = { fprop = "mine" }\nplugins = ["mine.py"]\n')
    PLUGINS.clear()
    yield place
    assert not marker.exists()
    assert all(plugin.function is None for plugin in PLUGINS.values())
    assert not {"helper", "mqo_plugin_mine"} & (sys.modules.keys() - before)


def names_of(group, names=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from names_of(command, (*names, name))
        else:
            yield " ".join((*names, name))


def test_each_command_has_its_place_here():
    """A new command that reads runs or quantizers needs a row in READING."""
    known = {*names_of(typer.main.get_command(cli.app))}
    assert {name.strip() for name in READING} | OTHERS | RUNNING == known


@pytest.mark.parametrize("name", READING)
def test_a_command_that_reads_does_not_run_quantizers(command_line, place, name):
    words, starts = READING[name]
    code, out, err = command_line(*name.split(), *words.split())
    if starts is False:
        assert code == 0, err
    else:
        assert code == 2 and err.startswith("mqo: ") and "Traceback" not in out + err
        assert not starts or BEGUN in err


def test_runs_with_two_quantizers_of_one_name_are_one_comparison(place):
    """Though what one run's file declares does not fit the other's options."""
    shown, left_out = collect([place])
    (group,) = compare(shown)[0]
    labels = [run.variant for run in group.runs]
    assert len(labels) == 2 == len({*labels}) and left_out == []
    assert [label.split(maxsplit=2)[2] for label in sorted(labels, key=len)] == ["n=2", "gain=3.0"]
