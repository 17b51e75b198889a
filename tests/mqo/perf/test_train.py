"""Which runs there are, with which flags; none of them runs here."""

import json
import os
import shlex

import pytest
from mqo.errors import MqoError
from mqo.launch import arguments
from mqo.launch.machine import Machine
from mqo.launch.own_data import of_options
from mqo.launch.own_types import OwnTypes
from mqo.launch.variants import GemmChoice, variants, with_plugins
from mqo.perf import measure
from mqo.perf import train as program
from mqo.perf.comparability import PROFILER, profiler_flags
from mqo.perf.train import PerfOptions, plan, train
from mqo.project import Project

from ..report.conftest import make_run

CPU, GPUS = Machine(4, 0), Machine(4, 2)


def asked(config="smoke", mode="FA_linear_mxfp8", **rest):
    (how,) = rest.pop("how", variants(mode))
    return PerfOptions("llama32-1b", how, *variants("bf16"), "wikipedia", config, **rest)


def test_the_pair_of_the_mode_differs_in_the_profiler_alone():
    made = plan(asked(), CPU)
    one, again = made.mode.config, made.again.config
    first = one.experiment.extra_flags
    more = [flag for flag in again.experiment.extra_flags if flag not in first]
    assert {flag for flag in more if flag.startswith("--")} == set(PROFILER)
    assert one.changed("experiment", extra_flags=again.experiment.extra_flags) == again
    assert (made.baseline.config.quantization.mode, one.quantization.mode) == (
        "bf16",
        "FA_linear_mxfp8",
    )
    assert made.baseline.config.experiment.extra_flags == one.experiment.extra_flags


def test_as_many_steps_are_run_as_are_judged_or_as_there_are():
    assert plan(asked(), CPU).mode.config.experiment.extra_flags == ("--exit-interval", "50")
    assert plan(asked("tiny"), CPU).mode.config.experiment.extra_flags == ("--exit-interval", "8")
    for config, last in (("smoke", 50), ("tiny", 8)):
        assert plan(asked(config), CPU).again.config.experiment.training.save_interval == last


@pytest.mark.parametrize("steps", [2, 3, 8, 50])
def test_the_profiler_watches_steps_that_there_are(steps):
    words = profiler_flags(steps)
    first, end = (int(words[words.index(f"--profile-step-{at}") + 1]) for at in ("start", "end"))
    assert 1 <= first < end <= steps


def test_both_runs_of_the_scaling_have_one_batch_and_as_many_threads():
    one, two = plan(asked(), CPU).scaling
    assert [p.config.placement.cluster.nproc_per_node for p in (one, two)] == [1, 2]
    assert one.config.experiment.extra_flags == two.config.experiment.extra_flags
    assert "--micro-batch-size" in one.config.experiment.extra_flags
    assert one.threads == two.threads == 2
    assert {p.threads for p in plan(asked(), GPUS).scaling} == {None}
    assert [p.config.experiment.training.save_interval for p in (one, two)] == [0, 0]


@pytest.mark.parametrize(
    ("machine", "rest", "reason"),
    [
        (Machine(1, 0), {}, "the machine has one core"),
        (Machine(4, 1), {}, "the machine has one GPU"),
        (CPU, {"flags": ("--global-batch-size", "3", "--micro-batch-size", "1")}, "3 sequences"),
    ],
)
def test_what_cannot_scale_says_why(machine, rest, reason):
    made = plan(asked(**rest), machine)
    assert made.scaling == ()
    assert reason in made.unscaled
    assert plan(asked(), CPU, scaling=False).unscaled == "--no-scaling was given"


def test_a_cell_that_cannot_run_is_refused_before_any_does():
    with pytest.raises(MqoError, match="heads 7"):
        plan(asked(flags=("--num-attention-heads", "7")), CPU)
    with pytest.raises(MqoError) as error:
        plan(asked(flags=("--train-samples", "4")), CPU)
    assert str(error.value) == (
        "The training has 1 step. Expected: at least 2 steps, one to profile."
    )
    with pytest.raises(MqoError, match="No data was given"):
        plan(asked("standard"), CPU)


@pytest.mark.parametrize(
    "rest",
    [
        {"gemms": GemmChoice("all")},
        {"gemms": GemmChoice("all", "all"), "mode": "qk_pv_mxfp8"},
        {
            "how": variants("", "nvfp4 without hadamard with output_layer"),
            "gemms": GemmChoice("all", "all"),
        },
        {
            "how": variants(
                "mxfp4", axes=("block=16", "rounding=stochastic", "exclude=output_layer")
            )
        },
        {"how": variants("mxfp4", axes=("schedule=fprop: mxfp4 until 9, then none",))},
        {"how": variants("linear_hifp8", axes=("tensor-scale=true",))},
        {"model_class": "hybrid"},
        {"flags": ("--hybrid-layer-pattern", "-*-**--")},
    ],
)
def test_the_command_of_a_run_is_that_of_its_cell(rest):
    made = plan(asked(**{"flags": ("--lr", "1e-4")} | rest), CPU)
    for planned in made.runs:
        words = shlex.split(planned.command())
        threads = words.pop(0) if planned.threads else ""
        assert threads == (f"OMP_NUM_THREADS={planned.threads}" if planned.threads else "")
        assert words[:2] == ["mqo", "train"]
        own, extra = arguments.split_flags(words[2:])
        cell = arguments.config_from(arguments.parser().parse_intermixed_args(own), extra)
        assert cell == planned.config.changed("experiment", training=cell.experiment.training)


def test_both_choices_of_gemms_are_facts_of_a_test():
    facts = asked(gemms=GemmChoice("all", "all")).facts
    assert (facts["gemms"], facts["attention_gemms"]) == ("all", "all")


def test_the_command_of_a_run_with_own_text_names_the_text(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"text": "The miller weighs the flour."}\n')
    data = of_options(Project.here(), [path], None, None, strict=True)
    (way,) = variants("mxfp8")
    (base,) = variants("bf16")
    options = PerfOptions("llama32-1b", way, base, "mine", "smoke", data=data)
    planned = plan(options, CPU).mode
    own, extra = arguments.split_flags(shlex.split(planned.command())[2:])
    cell = arguments.config_from(arguments.parser().parse_intermixed_args(own), extra)
    assert cell.experiment.text == data.text
    assert cell == planned.config.changed("experiment", training=cell.experiment.training)
    json.dumps(options.facts)


@pytest.mark.parametrize(
    ("ways", "options", "words"),
    [
        (("linear_mine",), ("mine.bits=3",), ["--plugin", "--plugin-option"]),
        (("linear_mine", "", ("mine.bits=2,3",)), (), ["--plugin-option", "--plugin"]),
        (("", "quest"), ("quest.bits=3",), ["--plugin-option"]),
    ],
)
def test_only_a_run_that_uses_a_quantizer_names_it(tmp_path, ways, options, words):
    file = tmp_path / "mine.py"
    file.write_text(
        "from mqo.quant import quantizer\n"
        '@quantizer("mine", options={"bits": 4})\ndef mine(x, context):\n    return x\n'
    )
    own = OwnTypes.from_options(plugins=[file], options=options)
    base, *others = with_plugins([*variants("bf16"), *variants(*ways)], own)
    for way in others:
        made = plan(PerfOptions("llama32-1b", way, base, "wikipedia", "smoke"), CPU)
        assert "--plugin" not in made.baseline.command()
        given = shlex.split(made.mode.command().partition("mqo train")[2])
        own, extra = arguments.split_flags(given)
        assert [word for word in own if word.startswith("--plugin")] == words
        cell = arguments.config_from(arguments.parser().parse_intermixed_args(own), extra)
        assert cell.quantization == made.mode.config.quantization


def test_at_real_size_a_command_names_its_processes():
    """There the launcher's default is all GPUs."""

    def command(of):
        return of.planned("one", of.baseline, steps=3).command()

    assert "--nproc-per-node 1 " in command(asked("fast"))
    assert "--nproc-per-node" not in command(asked())


def test_runs_are_trained_in_turn_each_with_its_threads(tmp_path, monkeypatch):
    seen = []

    def run(project, config, *, report, folder):
        seen.append((config.quantization.mode, os.environ.get("OMP_NUM_THREADS")))
        folder.root.rmdir()
        make_run(folder.root, config.quantization.mode)

    monkeypatch.setattr(program, "run", run)
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    of = asked(mode="mxfp4")
    cells = [of.planned("one", of.baseline, steps=3)]
    cells.append(of.planned("two", of.mode, steps=3, threads=1))
    done = train(Project.here(), cells, tmp_path / "runs", lambda text: None)
    assert seen == [("bf16", "9"), ("mxfp4", "1")]
    assert os.environ["OMP_NUM_THREADS"] == "9"
    assert [run.variant for run in done.values()] == ["bf16", "mxfp4"]
    assert (
        json.loads((tmp_path / "runs/two/cell.json").read_text())["quantization"]["mode"] == "mxfp4"
    )


def test_several_are_checked_together_and_tested_in_folders_of_their_own(tmp_path, monkeypatch):
    tested = []

    def test(project, asked, planned, place):
        tested.append((asked.mode.name, place.relative_to(tmp_path).as_posix(), place.is_dir()))
        return asked.mode.name == "hif4-recipe"

    monkeypatch.setattr(measure, "_run_test", test)
    all_of = [asked(how=[how]) for how in variants("FA_mxfp8", "hif4")]
    assert measure.run_tests(all_of, tmp_path / "out", scaling=False) is True
    assert tested == [("FA_mxfp8", "out/FA_mxfp8", True), ("hif4-recipe", "out/hif4-recipe", True)]
    bad = asked(how=variants("mxfp4"), flags=("--num-attention-heads", "7"))
    with pytest.raises(MqoError, match="heads 7"):
        measure.run_tests([*all_of, bad], tmp_path / "none", scaling=False)
    assert not (tmp_path / "none").exists()
