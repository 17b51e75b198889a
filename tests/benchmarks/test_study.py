"""The study: its arms can be trained, its questions name them, its numbers are right."""

import csv
import json
import re
import statistics
import subprocess
import sys
import tomllib
from dataclasses import astuple
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "benchmarks" / "study"
SEEDS = {1: 0.02, 2: 0.05, 3: 0.035}


@pytest.fixture(scope="module")
def study_module():
    """A function that imports a module of the study, as its programs import each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STUDY)
        yield import_module


@pytest.fixture(scope="module")
def study(study_module):
    return study_module("study")


@pytest.fixture(scope="module")
def table(study_module):
    return study_module("table")


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
        pairs = question.get("pairs") or [question["order"]]
        assert {arm for pair in pairs for arm in pair} <= trained


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
    phase = {
        "size": "s",
        "steps": 10,
        "seeds": [1],
        "models": {"m": ["none", "mxfp4", "later"], "n": ["x"]},
    }
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
    planned = {"none": {1, 2, 3}, "mxfp4": {2, 3}}
    assert losses.take_incomplete(planned) == []
    del losses.last["mxfp4"][1]
    assert losses.take_incomplete(planned) == []
    del losses.last["mxfp4"][2]
    assert losses.take_incomplete(planned) == ["mxfp4"]
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


@pytest.fixture
def eight_arms(table):
    """Return a function that makes the losses of eight arms and five seeds.

    It takes the gap of arm n after 5 and after 10 steps, as functions of n and the seed.
    """

    def losses(early, late):
        made = table.Losses()
        gaps = [("none", lambda n, seed: 0.0, lambda n, seed: 0.0)]
        gaps += [(f"arm{n}", early, late) for n in range(8)]
        for n, (arm, half, last) in enumerate(gaps, -1):
            for seed in range(1, 6):
                made.last[arm][seed] = 6 + last(n, seed)
                made.curve[arm][seed] = [[5, 7 + half(n, seed)], [10, 6 + last(n, seed)]]
            if arm != "none":
                made.sqnr[arm] = {"fprop.x": 30.0 - n, "wgrad.grad": 10.0}
        return made

    return losses


def test_predictors_of_a_known_order_have_its_rank_correlation(study_module, eight_arms):
    predictions = study_module("predict").predictions
    losses = eight_arms(early=lambda n, seed: -n / 9, late=lambda n, seed: n / 10)
    ratios = {f"arm{n}": 9.0 - n for n in range(7)}
    found = {one.name: one for one in predictions(losses, ratios | {"arm7": 9.5})}
    assert found["SQNR, mean of the forward pass's operands"].rho == pytest.approx(1)
    assert found["gap after 5 steps"].rho == pytest.approx(-1)
    assert found["gap after 10 steps"].rho == pytest.approx(1)
    # Seven in order, and the last before the first: 1 - 6 (7 * 1 + 7^2) / (8 * 63).
    assert found["gradient to noise after 100 steps"].rho == pytest.approx(1 - 6 * 56 / 504)
    for one in found.values():
        assert one.low <= one.rho <= one.high and one.arms == 8


def test_a_gap_is_not_predicted_from_the_seeds_that_have_it(study_module, eight_arms):
    """Noise that is a seed's own, in all arms anew, predicts nothing in other seeds."""
    predictions = study_module("predict").predictions
    noise = [[(3 * n * n + 5 * seed * n + 2 * seed) % 7 for seed in range(6)] for n in range(8)]
    losses = eight_arms(lambda n, seed: noise[n][seed], lambda n, seed: noise[n][seed])
    (last,) = [one for one in predictions(losses, {}) if one.name == "gap after 10 steps"]
    assert abs(last.rho) < 0.7


def test_an_unquantized_fprop_has_the_highest_sqnr(study_module, eight_arms):
    predictions = study_module("predict").predictions
    losses = eight_arms(lambda n, seed: 0.0, lambda n, seed: n / 10)
    del losses.sqnr["arm0"]["fprop.x"]
    by_name = {one.name: one for one in predictions(losses, {})}
    assert by_name["SQNR, mean of the forward pass's operands"].rho == pytest.approx(1)


def test_a_published_order_is_compared_pair_by_pair(table, eight_arms):
    losses = eight_arms(lambda n, seed: 0.0, lambda n, seed: n / 10 + seed / 1000 * (n % 2))
    text = table.agreement(losses, ["arm0", "arm1", "arm3", "arm2"])
    assert text.startswith("Of the 6 pairs of the published order, 5 have this order here")
    assert "16.7%" in text and text.endswith("all pairs, 5.")
    assert table.agreement(losses, ["arm0", "missing"]).endswith("missing.")


@pytest.mark.parametrize(("ordered", "share"), [(0, 1), (1, 5 / 6), (2, 0.5), (3, 1 / 6)])
def test_the_chance_of_an_order_counts_all_orders(table, ordered, share):
    assert table.at_least(ordered, 3) == pytest.approx(share)


def test_each_question_has_a_picture_of_its_own(study, table):
    names = [question["name"] for question in study.ARMS["questions"]]
    assert len(set(names)) == len(names)
    for question in study.ARMS["questions"]:
        assert table.pairs_of(question)
    linked = set(re.findall(r"\(answers/([a-z0-9-]+)\.png\)", (STUDY / "results.md").read_text()))
    assert linked == {path.stem for path in (STUDY / "answers").glob("*.png")}


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


def test_what_the_documents_say_is_in_the_table(study_module, table):
    """Each `mean (low to high)` is a gap of the committed runs in percent, or a correlation."""
    plan = tomllib.loads((STUDY / "arms.toml").read_text())
    known = set()
    predictions = study_module("predict").predictions
    tables = table.read(STUDY / "runs.csv")
    for key, losses in tables.items():
        if table.BASELINE not in losses.last:
            continue
        losses.take_incomplete(table.planned(plan, key))
        for predictor in predictions(losses, table.noise_of(tables, key)):
            known.add((predictor.rho, predictor.low, predictor.high))
        pairs = [(arm, table.BASELINE) for arm in losses.last if arm != table.BASELINE]
        pairs += [pair for question in plan["questions"] for pair in table.pairs_of(question)]
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


WITH_P = re.compile(QUOTED.pattern + r";\sp = (\d\.\d+)")
ROW = re.compile(r"\| (\S+) to (\S+) \| (\S+)% \| \S+ \| (\d\.\d{3}) \|")


def test_each_p_in_the_documents_is_one_of_its_gap():
    """Of some table: Holm's correction depends on the question."""
    rows = [tuple(map(float, row)) for row in ROW.findall((STUDY / "results.md").read_text())]
    quoted = WITH_P.findall((STUDY / "README.md").read_text())
    assert len(quoted) > 10
    for *gap, p in quoted:
        mean, low, high = map(float, gap)
        ours = {
            f"{row_p:.{len(p) - 2}f}"
            for row_low, row_high, row_mean, row_p in rows
            # The row's interval is in nats, and the unquantized losses are near 5.6.
            if row_mean == mean
            and 100 * (row_high - row_low) / (high - low) == pytest.approx(5.6, abs=0.4)
        }
        assert p in ours, (gap, p, ours)


def test_the_committed_tables_are_those_of_the_committed_runs(table, capsys):
    table.main()
    assert capsys.readouterr().out == (STUDY / "results.md").read_text()
