"""The sections and the page of a test, of made-up runs; the programs of the tree do not run."""

import json
import math
import re

import pytest
from mqo.errors import MqoError
from mqo.perf import sections as program
from mqo.perf.comparability import RECORD, read
from mqo.perf.measure import verdict_lines, write
from mqo.perf.page import curves, shown
from mqo.perf.sections import Measured, precision, sections
from mqo.report.page import MINUS, NOTHING


def by_name(found):
    return {section.name: section for section in found}


def test_every_section_has_numbers_verdicts_and_commands(made):
    _, measured = made()
    found = by_name(sections(measured))
    order = ["precision", "loss", "determinism", "throughput", "breakdown", "memory", "scaling"]
    assert list(found) == order
    assert all(one.verdicts and one.rows and one.about and one.commands for one in found.values())
    assert {v.outcome for v in found["precision"].verdicts} == {"pass"}
    assert [row["SQNR, dB"] for row in found["precision"].rows] == [27.5, 27.5]
    assert found["precision"].rows[0]["product alone, dB"] == math.inf


def test_losses_are_compared_over_the_first_steps(made):
    _, measured = made()
    section = by_name(sections(measured))["loss"]
    base, mode = (dict(measured.runs[name].train) for name in ("baseline", "mode"))
    wanted = [abs(mode[n] - base[n]) / base[n] for n in range(1, 51)]
    (row,), (verdict,) = section.rows, section.verdicts
    assert (row["steps"], verdict.outcome) == (50, "pass")
    assert verdict.value == row["mean relative error"] == pytest.approx(sum(wanted) / 50)


def test_too_few_steps_are_shown_and_not_judged(made):
    _, measured = made(scaling=False)
    short = {n: measured.runs[n] for n in ("baseline", "mode", "again")}
    short = {n: run.__class__(**{**vars(run), "train": run.train[:8]}) for n, run in short.items()}
    (verdict,) = program.loss(Measured(measured.plan, short, measured.folder)).verdicts
    assert (verdict.outcome, verdict.why) == ("not judged", "8 steps, and the threshold is for 50")
    assert verdict.value > 0


def test_speed_and_memory_are_held_to_the_baselines(made):
    _, measured = made(step_s=0.45, memory=2**30)
    found = by_name(sections(measured))
    (ratio,) = found["throughput"].verdicts
    assert (ratio.outcome, round(ratio.value, 6)) == ("pass", 1.5)
    base, mode = found["throughput"].rows
    assert (round(base["tokens/s"]), mode["MFU, %"]) == (3413, None)
    assert mode["TFLOP/s"] == pytest.approx(3e9 / 0.45 / 1e12)
    (memory,) = found["memory"].verdicts
    assert (memory.outcome, memory.value) == ("fail", 2)
    parts = {row["part"]: row["MiB"] for row in found["memory"].rows}
    assert (parts["weights"], parts["gradients"], parts["optimizer"]) == (4, 4, 8)
    assert parts["activations and all else"] == 1024 - 16


def test_a_device_whose_peak_is_known_has_an_mfu(made):
    run = made(scaling=False)[1].runs["mode"]
    machine = run.machine.__class__("gpu", "NVIDIA H200", 4, 2, "1")
    known = run.__class__(**{**vars(run), "machine": machine, "dtype": "bf16"})
    assert program._peak(known) == 2 * 989.4
    assert program._peak(run) is None
    assert program._speed("mode", known)["MFU, %"] == pytest.approx(
        100 * 3e9 / 0.5 / 1e12 / (2 * 989.4)
    )


def test_without_a_coverage_nothing_is_made_up(made, monkeypatch):
    _, measured = made(scaling=False)
    for run in measured.runs.values():
        run.folder.coverage.unlink()
    monkeypatch.setattr(program, "_precision", lambda run: {})
    found = by_name(sections(measured))
    assert found["precision"].verdicts[0].outcome == "not judged"
    assert found["throughput"].rows[1]["TFLOP/s"] is None
    assert [row["part"] for row in found["memory"].rows] == ["peak, mode", "peak, baseline"]


def test_a_bit_that_differs_fails(made, monkeypatch):
    _, measured = made(scaling=False)
    again = measured.runs["again"].folder.metrics
    rows = [json.loads(row) for row in again.read_text().splitlines()]
    rows[4]["value"] = math.nextafter(rows[4]["value"], 0)
    again.write_text("".join(json.dumps(row) + "\n" for row in rows))
    digests = {"mode": {"a": 1, "b": 2}, "again": {"a": 1, "b": 3}}
    monkeypatch.setattr(program, "_digests", lambda run: digests[run.folder.root.name])
    losses, weights = by_name(sections(measured))["determinism"].verdicts
    assert (losses.outcome, weights.outcome) == ("fail", "fail")
    assert losses.why.startswith("differs at step 5: lm loss was")
    assert weights.why == "1 differ, first b"


def test_scaling_is_the_speed_up_of_paired_steps(made):
    _, measured = made()
    section = by_name(sections(measured))["scaling"]
    assert [row["speed-up"] for row in section.rows] == [1.0, 1.0]
    (verdict,) = section.verdicts
    assert (verdict.outcome, verdict.value) == ("pass", 0.5)
    (skipped,) = by_name(sections(made("another", scaling=False)[1]))["scaling"].verdicts
    assert (skipped.outcome, skipped.why) == ("not judged", "--no-scaling was given")


def test_runs_that_differ_are_not_put_on_one_page(made):
    _, measured = made(scaling=False, seed=7)
    with pytest.raises(MqoError, match=r"seed .* 1234 .* 7"):
        sections(measured)


# -- the folder --------------------------------------------------------------------------------


def test_the_folder_holds_the_page_and_a_record_that_can_be_compared(made):
    asked, measured = made(memory=2**31)
    found = sections(measured)
    write(asked, measured, found)
    assert not list(measured.folder.glob(".*"))
    record = json.loads((measured.folder / RECORD).read_text())
    assert record["asked"]["mode"] == "FA_linear_mxfp8"
    assert [one["name"] for one in record["sections"]] == [one.name for one in found]
    assert len(read(measured.folder).repeats) == 2
    html = (measured.folder / "index.html").read_text()
    for section in found:
        assert f'id="{section.name}"' in html
    assert "1 of 9 fails" in html
    assert html.count("<polyline") == 2
    # Nothing is fetched, and nothing runs.
    assert not re.search(r"""(src|href)=["'](?!#|data:,)""", html)
    assert "<script" not in html


def test_what_is_printed_is_80_columns_wide_and_says_why_it_is_no_pass(made):
    text = verdict_lines(sections(made(scaling=False, memory=2**31)[1]))
    assert max(map(len, text)) <= 80
    words = " ".join(" ".join(text).split())
    assert "fail peak memory, mode over baseline 4.000 at most 1.5 x" in words
    assert "not judged efficiency of 2 processes" in words
    assert "--no-scaling was given" in words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, NOTHING),
        ("1 x 2", "1 x 2"),
        (12345, "12,345"),
        (0.0, "0"),
        (1234.56, "1,235"),
        (12.3456, "12.35"),
        (0.0123456, "0.01235"),
        (-1.5, f"{MINUS}1.500"),
        (1.5e-7, f"1.50e{MINUS}07"),
        (7.35e10, "7.35e+10"),
        (math.inf, "∞"),
        (math.nan, "not finite"),
    ],
)
def test_a_cell_has_four_digits(value, text):
    assert shown(value) == text


def test_curves_fill_the_drawing_on_one_scale():
    assert curves([[(1, 4.0), (3, 2.0)], [(1, 3.0), (3, math.nan), (2, 3.0)]]) == [
        "0.0,0.0 640.0,220.0",
        "0.0,110.0 320.0,110.0",
    ]
    assert curves([[(1, 4.0)], [(1, 4.0), (2, 3.0)]]) == []


@pytest.mark.parametrize(
    ("more", "judged"),
    [
        ("", "pass"),
        ("[quantizer]\ncache_weights = true\n", "pass"),
        ('[operands]\n"wgrad.grad" = { rounding = "stochastic" }\n', "pass"),
        ('[quantizer]\nrounding = "stochastic"\n', "not judged"),
        ('[operands]\n"fprop.weight" = { tile = "square" }\n', "not judged"),
    ],
)
def test_a_threshold_is_of_a_format_as_it_is_by_default(made, more, judged):
    _, measured = made()
    folder = measured.runs["mode"].folder
    folder.quant_config.write_text(folder.quant_config.read_text() + more)
    (verdict,) = [one for one in precision(measured).verdicts if "fprop" in one.what]
    assert verdict.outcome == judged
