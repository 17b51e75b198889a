"""A format of a user in real runs: trained with, recorded, replayed, resumed, evaluated."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from mqo.errors import ConvertError, FormatError, RunError
from mqo.launch import evaluation
from mqo.launch.config import RunConfig, resolve
from mqo.launch.export import export
from mqo.launch.forward_pass import AS_TRAINED, SavedModel
from mqo.launch.own_types import OwnTypes
from mqo.launch.rerun import BitEqual, rerun
from mqo.overlay.quant_types import modifier
from mqo.quant.formats import FORMATS
from mqo.report.colors import colors
from mqo.runs import RunFolder

pytest.importorskip("torch")
from . import real_runs
from .mqo.own_format import FILE
from .real_runs import SAVED_HALFWAY, TINY, launched, losses, stats_of
from .vendored_tree import PROJECT

pytestmark = pytest.mark.slow

SITES = ("fprop", "dgrad", "wgrad", "qk", "pv")
# mxfp8 with another name, so its losses are known.
TWIN = '[formats.twin8]\nelement = "e4m3"\nscale = "e8m0"\nblock = 32\nsquare = true\n'


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of train_config.py with a format whose file is gone since, in two phases."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.toml").write_text(TWIN + FILE)
    names = ("--model", "llama32-1b", "--dataset", "wikipedia", "--training-config", "smoke")
    own = ("--formats", "own.toml", "--gemms", "all")
    command = [PROJECT.root / "script/train_config.py", *names, "--quantization", "twin8", *own]
    command += ["--runs", "the runs", "--", *real_runs.STEPS, *TINY]
    done = launched(*command, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "own.toml").unlink()
    (run,) = (folder / "the runs").iterdir()
    version = RunConfig.read(RunFolder(run)).quantization.formats["twin8"].version
    assert f"twin8 is {version}" in done.stdout
    return RunFolder(run)


def choice(folder, text):
    file = folder / "given.toml"
    file.write_text(text)
    return OwnTypes.from_options([file])


def test_it_trains_to_the_bits_of_the_format_that_it_is_like(trained, start):
    expected = start("mxfp8", gemms="all", flags=TINY)
    assert len(losses(trained)[0]) == 6
    assert losses(trained) == losses(expected)


def test_its_records_have_the_row_that_it_used(trained):
    quant = RunConfig.read(trained).quantization
    assert [*quant.formats] == ["twin8"]
    assert quant.name == f"twin8 {quant.formats['twin8'].version}"
    assert quant.formats["twin8"].version in trained.root.name
    assert {(row["site"], row["quant_type"]) for row in stats_of(trained)} == {
        (site, "twin8") for site in SITES
    }
    result = json.loads(trained.result.read_text())
    assert result["types"] == dict.fromkeys(SITES, "twin8")
    assert result["formats"] == {"twin8": quant.formats["twin8"].digest}
    assert json.loads(trained.coverage.read_text())["quantized_share"] > 0.5


def test_a_replay_needs_no_file(trained, checkout_with, tmp_path):
    project = checkout_with(runs=tmp_path)
    result = rerun(project, trained, allow_versions=True, report=lambda text: None)
    assert result == BitEqual(result.run, 6)


def test_a_report_shows_two_versions(trained, tmp_path):
    other = shutil.copytree(trained.root, tmp_path / "other")
    config, block = RunConfig.read(trained), TWIN.replace("block = 32", "block = 16")
    choice(tmp_path, block)
    names = ("llama32-1b", "wikipedia", "twin8", "smoke")
    changed = resolve(*names, extra_flags=config.experiment.extra_flags, gemms="all")
    changed.write(RunFolder(other))
    done = launched("-m", "mqo", "report", trained.root, other, "-o", tmp_path / "page")
    assert done.returncode == 0, done.stderr
    for run in (config, changed):
        assert run.quantization.name in done.stdout
    page = (tmp_path / "page/index.html").read_text()
    assert colors()["twin8"].light in page


def test_an_evaluation_uses_the_row_of_the_run(vendored, trained, tmp_path):
    words, model = evaluation.text(tokens=128), SavedModel.find(trained.root)
    own, equal = evaluation.evaluate(vendored, [model], [AS_TRAINED, "mxfp8"], words)
    assert own.types == dict.fromkeys(("fprop", "qk", "pv"), "twin8")
    assert own.mode == RunConfig.read(trained).quantization.name and own.loss == equal.loss
    other = choice(tmp_path, TWIN.replace("block = 32", "block = 16"))
    given = (vendored, [model], [AS_TRAINED], words, print, other)
    with pytest.raises(FormatError, match="twin8"):
        evaluation.evaluate(*given)


def test_its_weights_are_exported_only_in_a_format_of_mqo(vendored, trained, tmp_path):
    with pytest.raises(ConvertError, match="twin8"):
        export(vendored.root, trained.root, tmp_path / "packed")


def test_a_training_is_resumed_only_with_the_same_row(checkout_with, tmp_path):
    project, checkpoints = checkout_with(runs=tmp_path / "runs"), tmp_path / "checkpoints"
    names = ("llama32-1b", "wikipedia", "linear_own7", "smoke")

    def train(text, samples):
        choice(tmp_path, text)
        more = ("--train-samples", str(samples), "--override-opt-param-scheduler")
        flags = (*SAVED_HALFWAY.split(), *more)
        cell = resolve(*names, extra_flags=flags, checkpoint=checkpoints)
        return real_runs.run(project, cell)

    train(FILE, 12)
    with pytest.raises(RunError, match="own7 was"):
        train(FILE.replace("block = 32", "block = 16"), 24)
    assert [step for step, _ in losses(train(FILE + 'source = "mine"\n', 24))[0]] == [4, 5, 6]


def test_a_literal_in_the_tree_is_set_and_read_with_the_file(vendored, tmp_path):
    tree = tmp_path / "tree"
    for site in modifier.check(vendored.root).sites:
        (tree / site.site.path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(vendored.root / site.site.path, tree / site.site.path)
    (tmp_path / "own.toml").write_text(FILE)
    program = [sys.executable, str(PROJECT.root / "script/quant_type_modifier.py"), "--tree", tree]

    def call(*words):
        done = subprocess.run(
            [*map(str, program), *map(str, words)],
            capture_output=True,
            text=True,
            env={**os.environ, "XDG_CONFIG_HOME": str(tmp_path)},
        )
        return done.returncode, done.stdout + done.stderr

    own = ("--formats", tmp_path / "own.toml")
    assert call("--linear-quant", "own7")[0] == 2
    assert call("--linear-quant", "mxfp8", *own)[0] == 2
    assert call("--restore", *own)[0] == 2
    assert call("--linear-quant", "own7", *own)[0] == 0
    assert "own7" in call("--check", *own)[1].split("\n")[2]
    assert "none (own7)" in call("--check")[1]
    assert "own7" not in FORMATS
