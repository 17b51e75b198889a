"""The study: its arms can be trained, its questions name them, its numbers are right."""

import csv
import json
import re
import statistics
import subprocess
import sys
import tomllib
from dataclasses import astuple
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "benchmarks" / "study"
SEEDS = {1: 0.02, 2: 0.05, 3: 0.035}


@pytest.fixture(scope="module")
def study(benchmark_module):
    return benchmark_module("study.study")


@pytest.fixture(scope="module")
def table(benchmark_module):
    return benchmark_module("study.table")


def test_every_cell_of_every_phase_has_a_configuration_of_its_own(study):
    for phase, of in study.ARMS["phases"].items():
        cells = [cell for cell in study.cells(phase) if cell.seed == of["seeds"][0]]
        made = [cell.config.quantization.model_dump_json() for cell in cells]
        assert len(set(made)) == len(made) == sum(map(len, of["models"].values()))
        for cell in cells:
            quantized = set((cell.config.quantization.types or {}).values()) != {"none"}
            assert quantized == (cell.arm != "none")


def test_a_question_names_arms_that_the_study_trains(study):
    trained = {cell.arm for phase in study.ARMS["phases"] for cell in study.cells(phase)}
    for question in study.ARMS["questions"]:
        assert {arm for pair in question["pairs"] for arm in pair} <= trained


def test_a_finished_row_is_not_trained_again(study, tmp_path, monkeypatch):
    first, second, *_ = study.cells("study")
    monkeypatch.setattr(study, "TABLE", tmp_path / "runs.csv")
    assert study.done() == set()
    rest = {"date": "", "commit": "", "upstream": "", "torch": "", "sqnr": "{}", "curve": "[]"}
    study.append(
        study.TrainedCell(*astuple(first), validation=6.0, training=6.0, seconds=1.0, **rest)
    )
    assert study.done() == {first}
    assert second not in study.done()


@pytest.fixture
def runs(study, tmp_path, monkeypatch):
    """A table with three seeds, in each of which `mxfp4` is above `none` by SEEDS."""
    monkeypatch.setattr(study, "TABLE", tmp_path / "runs.csv")
    rest = {"date": "", "commit": "", "upstream": "", "torch": "", "training": 0.0, "seconds": 1.0}
    for seed, gap in SEEDS.items():
        for arm, more in (("none", 0.0), ("mxfp4", gap)):
            last = 6 + seed + more
            curve = f"[[5, {7 + seed + more / 2}], [10, {last}], [10, {last}]]"
            cell = astuple(study.Cell("m", arm, "s", 10, seed))
            sqnr = "{}" if arm == "none" else '{"fprop.x": 18.0}'
            study.append(study.TrainedCell(*cell, validation=last, curve=curve, sqnr=sqnr, **rest))
    return tmp_path / "runs.csv"


def test_the_tables_intervals_are_those_of_the_independent_program(table, runs, tmp_path):
    text = table.table(table.read(runs)["m", "s", 10], [("mxfp4", "none")])
    program = tmp_path / "check_intervals.py"
    program.write_text((STUDY / "check_intervals.py").read_text())
    command = [sys.executable, program, "m", "s", "10", "mxfp4"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == "m s 10 mxfp4: +0.0350, -0.0023 to +0.0723 (3 seeds)\n"
    assert "| +0.0350 | -0.0023 to +0.0723 |" in text


def test_the_gap_half_way_is_of_the_evaluations_there(table, runs):
    (line,) = table.closing(table.read(runs)["m", "s", 10], ["mxfp4"]).splitlines()[2:]
    assert line.startswith("| mxfp4 | +0.0175 | +0.0350 | +0.0175 |")


def test_arms_without_runs_are_named(table, runs):
    losses = table.read(runs)["m", "s", 10]
    phase = {"size": "s", "steps": 10, "models": {"m": ["none", "mxfp4", "later"], "n": ["x"]}}
    plan = {"phases": {"one": phase, "other": phase | {"size": "t", "models": {"m": ["y"]}}}}
    assert table.not_run(plan, ("m", "s", 10), losses) == ["later"]
    assert table.not_run(plan, ("m", "s", 20), losses) == []
    pairs = [("mxfp4", "none"), ("later", "mxfp4"), ("unplanned", "mxfp4")]
    text = table.answer(losses, pairs, ["later"])
    assert "| mxfp4 | none | 3 |" in text and "later less mxfp4" in text
    assert "unplanned" not in text
    assert table.answer(losses, pairs[2:], ["later"]) == ""


def test_an_arm_without_all_seeds_is_taken_out(table, runs):
    losses = table.read(runs)["m", "s", 10]
    before = {*losses.last}
    assert losses.take_incomplete() == []
    losses.last["mxfp4"].popitem()
    assert losses.take_incomplete() == ["mxfp4"]
    assert {*losses.last} == before - {"mxfp4"} == {*losses.curve}
    assert "mxfp4" not in losses.sqnr


def test_the_arms_of_a_scale_rule_have_it(study):
    for rule in ("even", "rceil"):
        config = study.Cell("llama32-1b", f"mxfp4+{rule}", "h128-init", 500, 1).config
        assert config.quantization.options["scale_rule"] == rule
        assert config.quantization.types["wgrad"] == "mxfp4"


def test_arms_of_attention_differ_in_its_backward_pass(study):
    for kind in ("mxfp8", "mxfp4"):
        arms = (f"attention-{kind}", f"attention-{kind}+backward")
        cells = [study.Cell("llama32-1b", arm, "h128-init", 500, 1) for arm in arms]
        forward, both = ({**cell.config.quantization.types} for cell in cells)
        backward = {site: both.pop(site) for site in both.keys() - forward.keys()}
        assert forward == both
        assert backward == dict.fromkeys(("qk_recompute", "dv", "dp", "dq", "dk"), kind)


def test_the_seeds_needed_are_those_of_a_t_test_with_that_power(table):
    """10 for an effect of one standard deviation is what tables of power have."""
    found = [table.needed(gap * 0.01, 0.01) for gap in (5.0, 1.0, 0.1)]
    assert found == ["3", "10", "over 64"]


def test_a_rank_correlation_of_opposite_orders_is_one_less(table):
    gaps = {arm: [n / 10, n / 10, n / 10] for n, arm in enumerate("abc")}
    rho, low, high = table.spearman({"a": 30.0, "b": 20.0, "c": 10.0}, gaps)
    assert (rho, low, high) == pytest.approx((-1, -1, -1))


def test_the_committed_rows_are_whole_and_hold_no_cell_twice(study):
    with (STUDY / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    cells = [tuple(row[name] for name in ("model", "arm", "size", "steps", "seed")) for row in rows]
    assert len(set(cells)) == len(cells)
    for row in rows:
        curve = json.loads(row["curve"])
        last = [loss for step, loss in curve if step == curve[-1][0]]
        assert statistics.fmean(last) == pytest.approx(float(row["validation"]), abs=1e-5)
        assert row["commit"] and row["date"] and row["upstream"]


QUOTED = re.compile(r"([+-]?\d\.\d\d)\s\(([+-]?\d\.\d\d)\sto\s([+-]?\d\.\d\d)")


def test_what_the_documents_say_is_in_the_table(table):
    """Each `mean (low to high)` in percent is a gap of the committed runs."""
    questions = tomllib.loads((STUDY / "arms.toml").read_text())["questions"]
    known = set()
    for losses in table.read(STUDY / "runs.csv").values():
        pairs = [(arm, table.BASELINE) for arm in losses.last if arm != table.BASELINE]
        pairs += [tuple(pair) for question in questions for pair in question["pairs"]]
        gaps = [found for pair in pairs if (found := losses.paired(*pair))]
        for one in table.evidence(gaps):
            known.add(
                tuple(100 * value / losses.baseline for value in (one.mean, one.low, one.high))
            )
    for document in (STUDY / "README.md", ROOT / "docs/choosing.md"):
        quoted = [tuple(map(float, said)) for said in QUOTED.findall(document.read_text())]
        assert len(quoted) > 5
        for said in quoted:
            assert any(said == pytest.approx(one, abs=0.0051) for one in known), said


def test_the_committed_tables_are_those_of_the_committed_runs(table, capsys):
    table.main()
    assert capsys.readouterr().out == (STUDY / "results.md").read_text()
