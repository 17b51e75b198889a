"""A quantizer of the user in a real run: trained with, recorded, replayed, and run nowhere else."""

import json
import shutil
import subprocess
import sys

import pytest
from mqo.errors import RunError
from mqo.launch.config import RunConfig
from mqo.launch.origin import is_own
from mqo.launch.rerun import BitEqual, rerun
from mqo.project import Project
from mqo.quant.plugin_source import digest_of
from mqo.quant.plugins import PLUGINS
from mqo.runs import RunFolder

pytest.importorskip("torch")
from .real_runs import STEPS, TINY, losses, stats_of
from .vendored_tree import PROJECT

pytestmark = pytest.mark.slow

# What it returns depends on its option and on two modules of its folder.
FILES = {
    "mine.py": """
from __future__ import annotations
from dataclasses import dataclass
from kinds import kind_of
from mqo.quant import fake_quantize, quantizer

@dataclass
class Kind:
    name: str = ""

@quantizer("mine", block=32, options={"letter": "a"})
def mine(x, context):
    return fake_quantize(x, Kind(kind_of(context.options["letter"])).name)
""",
    "kinds/__init__.py": """
from .table import KINDS

def kind_of(letter):
    return KINDS[letter]
""",
    "kinds/table.py": 'KINDS = {"a": "mxfp4", "b": "mxfp8"}\n',
}
MODE = "FA_linear_mine"
SITES = ("fprop", "dgrad", "wgrad", "qk")


@pytest.fixture(autouse=True)
def no_plugin_left():
    yield
    PLUGINS.clear()


def program(*words, folder):
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=folder, capture_output=True, text=True
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of train_config.py with the quantizer, whose file and modules are gone since."""
    place = tmp_path_factory.mktemp("own")
    folder = place / "a folder"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    names = ("--model", "llama32-1b", "--dataset", "wikipedia", "--training-config", "smoke")
    own = ("--plugin", "a folder/mine.py", "--plugin-option", "mine.letter=b", "--dump", "1")
    done = program(
        *(PROJECT.root / "script/train_config.py", *names, "--quantization", MODE, *own),
        *("--gemms", "all", "--runs", "the runs", "--", *STEPS, *TINY),
        folder=place,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(folder)
    (run,) = (place / "the runs").iterdir()
    return RunFolder(run)


def test_it_trains_to_the_bits_of_the_format_that_it_computes(trained, start):
    expected = start("FA_linear_mxfp8", gemms="all", flags=TINY)
    assert len(losses(trained)[0]) == 6
    assert losses(trained) == losses(expected)
    noise = [
        {(r["site"], r["layer"], r["operand"], r["calls"], r["noise"]) for r in stats_of(run)}
        for run in (trained, expected)
    ]
    assert noise[0] == noise[1]


def test_the_run_keeps_copies_of_the_files_that_it_ran(trained):
    folder = trained.plugins / "mine"
    python = list(folder.rglob("*.py"))
    assert {str(path.relative_to(folder)): path.read_text() for path in python} == FILES
    config = RunConfig.read(trained)
    (plugin,) = config.quantization.plugins
    assert plugin.digest == digest_of(folder / "mine.py")
    assert plugin.options == {"letter": "b"}
    assert config.quantization.name == f"{MODE} {plugin.digest[:6]} letter=b"
    assert plugin.digest[:6] in trained.root.name and " " not in trained.root.name


def test_its_records_name_the_type(trained):
    assert {(row["site"], row["quant_type"]) for row in stats_of(trained)} == {
        (site, "mine") for site in SITES
    }
    coverage = json.loads(trained.coverage.read_text())
    kinds = {row["quant_type"] for row in coverage["products"]}
    assert kinds == {"mine", "none", None}  # None: a product at no site
    assert coverage["quantized_share"] > 0.5
    assert json.loads(trained.result.read_text())["types"] == {
        **dict.fromkeys(SITES, "mine"),
        "pv": "none",
    }
    assert "custom_quant_type = 'mine'" in trained.overlay_diff.read_text()


def test_a_replay_runs_the_copies_and_is_bit_equal(trained, checkout_with, tmp_path):
    result = rerun(checkout_with(runs=tmp_path), trained, report=lambda text: None)
    assert result == BitEqual(result.run, 6)
    again = RunFolder(tmp_path / result.run)
    assert stats_of(again) == stats_of(trained)
    assert digest_of(again.plugins / "mine/mine.py") == digest_of(trained.plugins / "mine/mine.py")
    assert PLUGINS["mine"].function is None


# -- a run from elsewhere --------------------------------------------------------------------------


@pytest.fixture
def foreign(trained, tmp_path):
    """A copy of the run whose quantizers, and the user's former files, would make a marker."""
    marker = tmp_path / "it ran"
    run = RunFolder(shutil.copytree(trained.root, tmp_path / "foreign"))
    source = RunConfig.read(run).quantization.plugins[0].source
    for folder in (run.plugins / "mine", source.parent):
        for name, text in FILES.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            head = "from __future__ import annotations\n"
            path.write_text(f"{head}open({str(marker)!r}, 'w')\n{text.replace(head, '')}")
    yield run
    shutil.rmtree(source.parent)
    assert not marker.exists()


READING = {
    "report": ("report", "foreign", "sound", "-o", "made"),
    "plot": ("plot", "foreign", "-o", "made.png"),
    "plot of operands": ("plot", "foreign", "--operands", "-o", "made.png"),
    "perf": ("perf", "--compare", "foreign", "sound"),
    "stats": ("stats", "foreign/dumps/iteration_1_rank_0.safetensors", "--tensor", "qk/*"),
    "convert": ("convert", "megatron-to-hf", "foreign", "made"),
    "status": ("status",),
    "eval": ("eval", "foreign", "--modes", "bf16", "--tokens", "64"),
    "generate": ("generate", "foreign", "--mode", "bf16", "--prompt", "The", "--tokens", "2"),
}
REFUSED = {
    "rerun": ("rerun", "foreign", "--allow-versions"),
    "eval": ("eval", "foreign", "--tokens", "64"),
    "generate": ("generate", "foreign", "--prompt", "The", "--tokens", "2"),
    "export": ("export", "foreign", "made"),
}


@pytest.mark.parametrize("words", READING.values(), ids=READING)
def test_a_command_that_reads_the_run_does_not_run_its_quantizers(foreign, trained, words):
    place = foreign.root.parent
    shutil.copytree(trained.root, place / "sound")
    done = program("-m", "mqo", *words, folder=place)
    assert done.returncode in (0, 1) and done.stdout, done.stderr  # 1: a verdict, or an action due


@pytest.mark.parametrize("words", REFUSED.values(), ids=REFUSED)
def test_a_command_that_would_run_them_refuses_the_run(foreign, words):
    done = program("-m", "mqo", *words, folder=foreign.root.parent)
    assert done.returncode == 2 and done.stderr.startswith("mqo: "), done.stdout + done.stderr
    assert not (foreign.root.parent / "made").exists()


def test_a_run_with_another_module_of_its_quantizer_is_not_ones_own(
    trained, checkout_with, tmp_path
):
    """Though command, source and the file itself are those that ran."""
    run = RunFolder(shutil.copytree(trained.root, tmp_path / "changed"))
    assert is_own(Project.here(), run)
    table = run.plugins / "mine/kinds/table.py"
    table.write_text(table.read_text().replace("mxfp8", "mxfp4"))
    with pytest.raises(RunError, match="--trust"):
        rerun(checkout_with(runs=tmp_path / "runs"), run)
    assert not (tmp_path / "runs").exists()
