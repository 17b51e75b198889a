"""Sweeps with custom quantizers, whose files are read and not run."""

from pathlib import Path

import pytest
from mqo.errors import MqoError
from mqo.launch.config import RunConfig
from mqo.launch.own_types import OwnTypes
from mqo.launch.plugins import copy_files
from mqo.quant.plugins import PLUGINS
from mqo.sweep import configs

# Who runs it ends the tests.
FILE = """
import helper_of_mine
from mqo.quant import quantizer

raise SystemExit("this file is not to be run")


@quantizer("{name}", options={{"bits": 3, "rule": "a"}})
def rounded(x, context):
    return x
"""
ARMS = ("bf16", "linear_mine_mine.rule-a", "linear_mine_mine.rule-b")


@pytest.fixture
def files(tmp_path):
    """A folder with the quantizers `mine` and `other`, and a recipe of `mine`."""
    root = tmp_path / "a folder"
    root.mkdir()
    (root / "helper_of_mine.py").write_text("FACTOR = 2\n")
    for name in ("mine", "other"):
        (root / f"{name}.py").write_text(FILE.format(name=name))
    (root / "own.toml").write_text(
        'types = { fprop = "mine" }\nplugins = ["mine.py"]\nplugin_options.mine.bits = 5\n'
    )
    return root


def jobs(modes, *paths, options=(), **rest):
    own = OwnTypes.from_options(plugins=paths, options=options)
    return configs.jobs("llama32-1b", "wikipedia", modes, "tiny", own=own, **rest)


def names(planned):
    return [job.name.removeprefix("llama32-1b_wikipedia_") for job in planned]


def options_of(job):
    return {plugin.name: plugin.options for plugin in job.config.quantization.plugins}


def test_each_value_of_an_option_is_a_run_of_the_modes_with_its_quantizer(files):
    axes = ("mine.rule=a,b",)
    planned = jobs("bf16,linear_mine", files / "mine.py", axes=axes, options=("mine.bits=4",))
    assert names(planned) == [*ARMS]
    chosen = [{}, {"mine": {"bits": 4}}, {"mine": {"bits": 4, "rule": "b"}}]
    assert [options_of(job) for job in planned] == chosen
    configs.check(planned)


def test_tables_show_the_versions_of_quantizers(files):
    plain, quantized = jobs("bf16,linear_mine", files / "mine.py")
    (plugin,) = quantized.config.quantization.plugins
    assert quantized.label == f"{quantized.name} {plugin.digest[:6]}"
    assert plain.label == f"{plain.name} (unquantized)"


def test_globs_match_modes_of_quantizers(files):
    assert "linear_mine" in names(jobs("*_mine", files / "mine.py"))
    assert "linear_mine" not in names(jobs("linear_*,mine", files / "mine.py"))


def test_a_recipe_brings_its_own_quantizers(files):
    recipes = f"{files / 'own.toml'},nvfp4"
    planned = jobs(None, recipes=recipes, options=("mine.rule=b",))
    chosen = [{}, {"mine": {"bits": 5, "rule": "b"}}, {}]
    assert [options_of(job) for job in planned] == chosen
    configs.check(planned)


def test_an_axis_leaves_recipes_as_they_are(files):
    recipes = str(files / "own.toml")
    planned = jobs("linear_mine", files / "mine.py", recipes=recipes, axes=("mine.bits=3,4",))
    chosen = [{"mine": {}}, {"mine": {"bits": 4}}, {"mine": {"bits": 5}}]
    assert [options_of(job) for job in planned] == chosen


@pytest.mark.parametrize(
    ("modes", "names", "rest", "text"),
    [
        ("linear_mine", ("mine", "other"), {}, r"other\.py changes nothing"),
        ("bf16", ("mine",), {}, r"mine\.py changes nothing"),
        (None, ("mine",), {}, r"mine\.py changes nothing"),
        (
            "linear_mine",
            ("mine", "other"),
            {"recipes": "mxfp8", "options": ("other.bits=4",)},
            "other",
        ),
        ("linear_mine", ("mine",), {"options": ("mien.bits=4",)}, "'mien'.*mine"),
        ("linear_mine", ("mine",), {"options": ("mine.bit=4",)}, "'bit'.*bits, rule"),
        ("linear_mine", ("mine",), {"options": ("mine.bits=x",)}, "mine.bits=x"),
        ("bf16", (), {"options": ("mine.bits=4",)}, "--plugin FILE"),
        (
            "linear_mine",
            ("mine",),
            {"options": ("mine.bits=4",), "axes": ("mine.bits=4,5",)},
            "both set mine.bits",
        ),
        ("linear_mine", ("mine",), {"axes": ("mine.rule=a b|a-b",)}, "Two different runs"),
        ("linear_mine", ("gone",), {}, r"gone\.py"),
    ],
)
def test_what_no_run_uses_is_refused(files, modes, names, rest, text):
    with pytest.raises(MqoError, match=text):
        jobs(modes, *(files / f"{name}.py" for name in names), **rest)


def test_a_sweep_continues_from_another_folder(files, folder, monkeypatch):
    before = jobs("linear_mine", files / "mine.py")
    folder.write(folder.entries(before))
    monkeypatch.chdir(files.parent)
    after = jobs("linear_mine", Path("a folder/mine.py"))
    assert [job.digest for job in after] == [job.digest for job in before]
    assert folder.entries(after).keys() == {after[0].name}


def test_another_version_of_a_quantizer_is_another_sweep(files, folder):
    folder.write(folder.entries(jobs("linear_mine", files / "mine.py")))
    (files / "helper_of_mine.py").write_text("FACTOR = 3\n")
    with pytest.raises(MqoError, match=r"other settings.*quantizers"):
        folder.entries(jobs("linear_mine", files / "mine.py"))


def test_a_job_knows_its_quantizers_from_its_folder(files, folder):
    (job,) = jobs("linear_mine", files / "mine.py", options=("mine.bits=4",))
    run = folder.new_run(job)
    PLUGINS.clear()
    config = RunConfig.read(run)
    assert config == job.config
    copy_files(config.quantization.plugins, run)
    copies = sorted(path.name for path in (run.root / "plugins" / "mine").iterdir())
    assert copies == ["helper_of_mine.py", "mine.py"]


def test_the_jobs_of_a_sweep_end_well(files, sweep):
    own = OwnTypes.from_options(plugins=[files / "mine.py"])
    entries, _ = sweep("bf16,linear_mine", own=own, axes=("mine.rule=a,b",))
    assert [entry.state for entry in entries.values()] == ["done"] * len(ARMS)
