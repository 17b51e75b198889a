"""Which runs are compared, by what, and what is refused."""

import json
from dataclasses import asdict, replace

import pytest
from mqo.errors import MqoError
from mqo.perf.comparability import RECORD, check_comparable, profiler_flags, read, timed
from mqo.perf.ratio import quartiles, ratio, ratio_lines

from ..report.conftest import make_run, write


@pytest.fixture
def timed_run(tmp_path):
    """A function that makes a run, with step times of its own if given, and reads it."""

    def make(name, mode="bf16", times=None, **rest):
        folder = make_run(tmp_path / name, mode, steps=20, **rest)
        if times:
            rows = [json.loads(row) for row in folder.metrics.read_text().splitlines()]
            rows = [row for row in rows if row["name"] != "iteration-time"]
            rows += [{"iteration": n, "name": "iteration-time", "value": s} for n, s in times]
            folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return read(folder.root)

    return make


@pytest.fixture
def mqo(command_line):
    """A function that runs `mqo perf`: its exit code, its output and its errors."""

    def run(*words):
        return command_line("perf", *words)

    return run


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rest", "named"),
    [
        ({"seed": 7}, "seed .* 1234 .* 7"),
        ({"digest": "ffff"}, "data "),
        ({"flags": ("--lr", "1")}, "--lr .* 0.002 .* 1"),
        ({"flags": ("--train-iters", "9")}, "--train-iters .* 9"),
        ({"model": "llama31-8b"}, "model .* llama32-1b .* llama31-8b"),
    ],
)
def test_runs_of_other_data_seeds_or_flags_are_refused_by_name(timed_run, rest, named):
    one, other = timed_run("one"), timed_run("other", "mxfp8", **rest)
    for allow in (False, True):
        with pytest.raises(MqoError, match=named):
            check_comparable(one, other, allow_versions=allow)


def test_other_steps_are_refused(timed_run):
    one = timed_run("one")
    other = replace(one, facts={**one.facts, "steps": "19"})
    with pytest.raises(MqoError, match=r"steps .* 20 .* 19"):
        check_comparable(one, other)


def test_other_versions_and_machines_are_refused_unless_they_are_allowed(timed_run):
    one, other = timed_run("one"), timed_run("other", cpu="Another CPU")
    newer = replace(one, versions={**one.versions, "torch": "9.9"})
    apexs = timed_run("fused", implementation={"optimizers": ["apex.FusedAdam"]})
    texts = ("Another CPU", "torch .* 2.13.0 .* 9.9", "torch.AdamW .* apex.Fused")
    for side, named in zip((other, newer, apexs), texts, strict=True):
        with pytest.raises(MqoError, match=named):
            check_comparable(one, side)
        check_comparable(one, side, allow_versions=True)


def test_modes_and_a_profiler_may_differ(timed_run):
    check_comparable(timed_run("one"), timed_run("two", "mxfp4", flags=profiler_flags(20)))


def test_what_is_neither_a_run_nor_a_result_is_refused(tmp_path, runs):
    with pytest.raises(MqoError, match=r"perf\.json .*cell\.json"):
        read(tmp_path)
    unfinished = runs("unfinished")
    unfinished.result.unlink()
    with pytest.raises(MqoError, match="compared: unfinished"):
        read(unfinished.root)
    (tmp_path / RECORD).write_text("{}")
    with pytest.raises(MqoError, match=r"perf\.json .*'timed'"):
        read(tmp_path)


@pytest.fixture
def runs(tmp_path):
    return lambda name: make_run(tmp_path / name)


# -- what is paired ----------------------------------------------------------------------------


def test_runs_are_paired_step_by_step_without_the_first_ones(timed_run):
    times = [(n, 100.0 if n < 3 else 1.0) for n in range(1, 21)]
    slower = [(n, 2.0 if n % 2 else 3.0) for n in range(1, 20)]
    found = ratio(timed_run("one", times=times), timed_run("other", times=slower))
    assert (found.unit, found.count) == ("steps", 17)
    assert (found.quartiles.low, found.quartiles.median, found.quartiles.high) == (2.0, 2.0, 3.0)


def test_several_repeats_are_paired_by_their_medians(timed_run):
    one = timed_run("one", times=[(n, 1.0) for n in range(1, 21)])
    twice = dict.fromkeys(range(1, 21), 2.0)
    several = replace(one, repeats=(one.repeats[0], twice))
    other = replace(one, repeats=(twice, dict.fromkeys(range(1, 21), 6.0)))
    found = ratio(several, other)
    assert (found.unit, found.count, found.quartiles.median) == ("repeats", 2, 2.5)
    assert (found.quartiles.low, found.quartiles.high) == (2.25, 2.75)


def test_steps_that_the_profiler_watched_do_not_count(timed_run):
    times = [(n, 1.0) for n in range(1, 21)]
    found = timed_run("one", times=times, flags=profiler_flags(20))
    assert sorted(found.repeats[0]) == [*range(1, 9), *range(15, 21)]


def test_one_value_has_no_spread_and_none_is_refused(timed_run):
    assert (quartiles([2.0]).median, quartiles([2.0]).low) == (2.0, None)
    one = timed_run("one", times=[(1, 1.0)])
    with pytest.raises(MqoError, match="same step"):
        ratio(one, timed_run("other", times=[(2, 1.0)]))


def test_the_lines_are_80_columns_wide(timed_run):
    one = timed_run("one", cpu="A CPU whose maker gave it " + "a long name " * 9)
    other = replace(timed_run("other", "mxfp8", step_s=1.0), name="mxfp8, " + "many options " * 9)
    text = ratio_lines(one, other, ratio(one, other))
    assert max(map(len, text)) <= 80
    assert text[-1] == "B/A 2.000x, quartiles 2.000 to 2.000, of 17 paired steps"


# -- the command -------------------------------------------------------------------------------


def test_two_runs_side_by_side(timed_run, mqo, tmp_path):
    timed_run("one"), timed_run("other", "mxfp4", step_s=0.25)
    code, out, _ = mqo("--compare", tmp_path / "one", tmp_path / "other")
    assert code == 0
    assert "B/A 0.500x" in out
    assert "500.0 ms per step" in out


def test_a_result_is_compared_as_its_runs_were(timed_run, mqo, tmp_path):
    one = timed_run("one")
    for name, table in (("a", one), ("b", replace(one, machine="a faster one"))):
        (tmp_path / name).mkdir()
        write(tmp_path / name / RECORD, {"timed": asdict(table)})
    assert read(tmp_path / "a") == one
    words = ("--compare", tmp_path / "a", tmp_path / "b")
    code, _, err = mqo(*words)
    assert code == 2
    assert "machine is A CPU, 2 cores, 2 threads and a faster one" in " ".join(err.split())
    assert mqo(*words, "--allow-versions")[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        *(
            ["--compare", "a", "b", *other]
            for other in (
                ("--model", "llama32-1b"),
                ("--mode", "mxfp4"),
                ("--recipes", "nvfp4"),
                ("--baseline", "bf16"),
                ("--plugin", "mine.py"),
                ("--no-scaling",),
                ("-o", "made"),
            )
        ),
        ["--model", "llama32-1b", "--mode", "mxfp4", "--repeats", "2"],
        ["--model", "llama32-1b", "--mode", "mxfp4", "--allow-versions"],
    ],
)
def test_an_option_of_the_other_use_is_refused(mqo, words):
    code, _, err = mqo(*words)
    assert code == 2
    assert "would have no effect" in " ".join(err.split())


def test_replays_take_turns(timed_run, mqo, tmp_path, monkeypatch):
    timed_run("one"), timed_run("other", "mxfp4")
    began = []

    def rerun(project, run, **rest):
        began.append(run.root.name)
        again = make_run(tmp_path / f"{run.root.name} {len(began)}", step_s=len(began))
        return type("Found", (), {"run": str(again.root)})

    monkeypatch.setattr("mqo.perf.measure.rerun", rerun)
    code, out, _ = mqo("--compare", tmp_path / "one", tmp_path / "other", "--repeats", 2)
    assert (code, began) == (0, ["one", "other", "one", "other"])
    assert "of 2 paired repeats" in out


def test_the_runs_of_a_repeat_are_held_to_each_other(runs):
    from mqo.perf.comparability import run_of

    one, other = (run_of(runs(name).root) for name in ("one", "other"))
    assert len(timed(one, other).repeats) == 2
    with pytest.raises(MqoError, match=r"seed .* 1234 .* 8"):
        timed(one, replace(other, seed="8"))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "--model, or one of --mode and --recipe"),
        (("--model", "llama32-1b"), "--model, or one of --mode and --recipe"),
        (("--model", "gpt", "--mode", "bf16"), "no model called 'gpt'"),
        (("--model", "llama32-1b", "--mode", "int8"), "no quantization mode called 'int8'"),
        (("--model", "llama32-1b", "--mode", "source"), "no quantization mode called 'source'"),
        (("--model", "llama32-1b", "--mode", "bf16", "--gemms", "x"), "choice of GEMMs"),
        (("--model", "llama32-1b", "--mode", "FA_mxfp8", "--gemms", "all"), "--gemms all"),
        (
            ("--model", "llama32-1b", "--mode", "linear_mxfp8", "--attention-gemms", "all"),
            "--attention-gemms all",
        ),
        (("--model", "llama32-1b", "--mode", "bf16", "--baseline", "x"), "called 'x'"),
        (
            ("--model", "llama32-1b", "--recipes", "hif4", "--axis", "block=16,32"),
            "--axis block=16,32 ",
        ),
        (("--model", "llama32-1b", "--mode", "bf16", "-o", "."), "not empty"),
    ],
)
def test_what_cannot_run_is_refused_with_2(mqo, words, named):
    code, out, err = mqo(*words)
    assert (code, out) == (2, "")
    assert named in err


def test_a_run_that_fails_is_an_error_and_no_verdict(mqo, monkeypatch, tmp_path):
    from mqo.errors import RunError

    def fail(*args):
        raise RunError("Training ended with exit code 1", exit_code=1)

    monkeypatch.setattr("mqo.perf.measure.train", fail)
    words = ("--model", "llama32-1b", "--mode", "bf16", "--training-config", "tiny")
    assert mqo(*words, "-o", tmp_path / "new")[0] == 2
    assert not (tmp_path / "new" / RECORD).exists()
