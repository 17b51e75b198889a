"""The report's files, without a browser."""

import base64
import csv
import gzip
import json
import re
import subprocess
import sys

import pytest
from mqo.errors import RunError, SetupError
from mqo.report import page as program
from mqo.report.collect import collect
from mqo.report.compare import compare
from mqo.report.curves import of_runs
from mqo.report.evidence import Evidence, Spread, evidence
from mqo.report.folder import replaced
from mqo.report.page import MINUS, NOTHING, Diffs, memory, number, page, shown, unseen
from mqo.report.series import DIFFERENCES
from mqo.runs import RunFolder


@pytest.fixture
def mqo(command_line):
    """A function that runs `mqo report`: its exit code, its output and its errors."""

    def run(*words):
        pytest.importorskip("plotly")
        return command_line("report", *words)

    return run


@pytest.fixture
def plain(monkeypatch):
    """A function that makes the page of a folder of runs, without plotly."""
    monkeypatch.setattr(program, "plotly_source", lambda: "plotly")

    def make(runs):
        found, left_out = collect([runs.root])
        groups, repeated = compare(found)
        return page(groups, left_out + repeated, "2026-11-21")

    return make


def unpacked(html, name):
    (text,) = re.findall(rf'id="{name}">([^<]*)<', html)
    return gzip.decompress(base64.b64decode(text)).decode()


def data(html):
    (text,) = re.findall(r'id="data">([^<]*)<', html)
    return json.loads(text)


# -- the folder ----------------------------------------------------------------------------------


def test_the_report_is_a_page_pictures_and_tables(mqo, runs, tmp_path):
    runs("one")
    runs("two", "mxfp4", loss=6.1)
    runs("three").result.unlink()
    code, out, err = mqo(runs.root, "-o", tmp_path / "the report")
    assert (code, err) == (0, "")
    title, _, *rows = out.splitlines()
    assert title == "llama32-1b on wikipedia, smoke: 2 runs"
    assert rows[0].split() == ["bf16", "(unquantized)", "1", "6.0000", NOTHING]
    assert rows[1].split() == ["mxfp4", "1", "6.1000", "+1.67%"]
    rest = " ".join(" ".join(rows[2:]).split())
    assert "T = 0.50%, take bf16 (unquantized), but" in rest
    assert "one seed" in rest
    assert "left out: three: " in out
    made = {path.name for path in (tmp_path / "the report").iterdir()}
    endings = [f"{of}.{ending}" for of in ("", "_gaps") for ending in ("png", "svg", "pdf")]
    pictures = {f"1_llama32-1b_wikipedia_smoke{ending}" for ending in endings}
    names = ("results", "sites", "verdicts", "runs", "left_out")
    assert made == {"index.html", "report.json", *pictures, *(f"{name}.csv" for name in names)}


def test_the_tables_hold_the_numbers(mqo, runs, tmp_path):
    runs("one", loss=6.0)
    runs("two", "mxfp4", loss=6.06)
    mqo(runs.root, "-o", tmp_path / "out")
    with (tmp_path / "out/results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["mode"] for row in rows] == ["bf16", "mxfp4"]
    assert float(rows[1]["gap"]) == pytest.approx(0.01)
    whole = json.loads((tmp_path / "out/report.json").read_text())
    assert whole["results"][1]["peak_memory"] == 2**30
    assert whole["verdicts"][0]["firm"] is False


def test_the_command_imports_no_torch(runs, tmp_path):
    pytest.importorskip("plotly")
    runs("one")
    code = (
        "import sys; from mqo import cli\n"
        "try:\n    cli.main()\nfinally:\n    assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, "report", runs.root, "-o", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_older_report_is_replaced(tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    for name in ("index.html", "report.json", "stale"):
        (old / name).write_text("old")
    with replaced(old) as folder:
        (folder / "index.html").write_text("new")
        assert (old / "index.html").read_text() == "old"
    assert [path.name for path in old.iterdir()] == ["index.html"]


@pytest.mark.parametrize("name", ["thesis.tex", "index.html", "report.json"])
def test_a_folder_that_is_not_a_report_is_left_as_it_is(tmp_path, name):
    (tmp_path / name).write_text("old")
    with pytest.raises(RunError, match=re.escape(str(tmp_path))), replaced(tmp_path):
        pass
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_report_that_fails_leaves_the_older_one(tmp_path):
    out = tmp_path / "out"
    with replaced(out) as folder:
        (folder / "index.html").write_text("old")
        (folder / "report.json").write_text("{}")
    with pytest.raises(ZeroDivisionError), replaced(out):
        raise ZeroDivisionError
    assert (out / "index.html").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_without_plotly_the_message_says_what_to_install(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(SetupError, match=r"\[report\]"):
        page([], [], "")


# -- the page ------------------------------------------------------------------------------------


def test_the_page_loads_nothing_from_elsewhere(plain, runs):
    runs("one")
    html = plain(runs)
    assert re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', html) == []
    assert "url(" not in html and "@import" not in html
    assert unpacked(html, "plotly") == "plotly"


def test_the_page_says_what_the_verdict_says(plain, runs):
    runs("one", loss=6.0)
    runs("two", "FA_linear_mxfp8", loss=6.006)
    html = plain(runs)
    assert "The evidence does not separate the modes yet." in html
    assert "<strong>FA_linear_mxfp8</strong>" in html
    assert "T = 0.50%; <code>mqo report --tolerance" in html
    assert "This does not show how fast a format is." in html
    assert "Measured on A CPU, 2 cores, 2 threads" in html
    assert "mxfp8: fprop qk<" in html
    assert "+0.10%" in html


def test_what_a_run_says_is_text_and_no_markup(plain, runs):
    folder = runs("one")
    folder.command.write_text(folder.command.read_text() + "# <b>bold</b>\n")
    runs("<i>two</i>").result.unlink()
    html = plain(runs)
    assert "&lt;b&gt;bold" in html and "<b>bold" not in html
    assert "&lt;i&gt;two" in html and "<i>two" not in html
    assert "<script>alert" not in html
    assert any("<script>alert" in part for part in json.loads(unpacked(html, "parts")).values())


def test_each_part_of_a_diff_is_there_once(runs):
    for name, mode in (("a", "bf16"), ("b", "FA_mxfp8"), ("c", "FA_linear_mxfp8")):
        runs(name, mode)
    found, _ = collect([runs.root])
    diffs = Diffs(found)
    assert len(diffs.parts) == 3  # bf16's site, mxfp8's, and the added file
    assert len(diffs.listed) == 2
    assert [diffs.number(run) for run in found] == [0, 1, 1]
    assert diffs.summary(found[0]) == "2 files, +3 -1 lines"


def test_a_loss_that_is_not_finite_is_a_gap_in_the_curve(plain, runs):
    folder = runs("one", steps=3)
    with folder.metrics.open("a") as lines:
        lines.write('{"iteration": 2, "name": "lm loss", "value": "nan"}\n')
    (curve,) = data(plain(runs))["groups"][0]["curves"]
    assert [value is None for value in curve["loss"]["y"]] == [False, True, False]


def test_seeds_are_one_curve_with_a_range_and_a_single_one_has_none(plain, runs):
    runs("bf16 1", seed=1, loss=7.0)
    runs("bf16 2", seed=1, loss=8.0, flags=("--seed=2",))
    runs("mxfp4", "mxfp4", seed=1)
    html = plain(runs)
    base, other = data(html)["groups"][0]["curves"]
    assert [base["valid"][name] for name in ("low", "y", "high")] == [[7.0], [7.5], [8.0]]
    assert "low" not in other["valid"]
    assert ": mxfp4 orange; unquantized black" in html


def test_of_many_modes_eight_are_shown_at_first_and_every_format_among_them(plain, runs):
    runs("base")
    kinds = ("mxfp8", "mxfp4", "hifp8", "nvfp4")
    for mode in (f"{family}{kind}" for kind in kinds for family in ("", "linear_", "FA_")):
        runs(mode, mode)
    html = plain(runs)
    shown = data(html)["groups"][0]["shown"]
    assert len(shown) == 8
    assert {name.rpartition("_")[2] for name in shown} == {"bf16", *kinds}
    pressed = re.findall(r'aria-pressed="true" data-variant="([^"]+)"', html)
    assert sorted(pressed) == sorted(shown)


def test_long_curves_are_thinned_to_means(plain, runs):
    runs("one", steps=400, loss=6.0)
    runs("two", "mxfp4", steps=400, loss=6.5)
    html = plain(runs)
    base, other = data(html)["groups"][0]["curves"]
    assert len(base["loss"]["x"]) == 400
    assert base["difference"]["x"] == []
    assert len(other["difference"]["x"]) <= DIFFERENCES
    assert other["difference"]["x"][:2] == [3, 6]
    assert "means of 3 steps" in html


def test_variants_of_one_mode_share_a_dash_and_differ_in_lightness_or_marker(plain, runs):
    runs("one", "mxfp4")
    folder = runs("two", "mxfp4")
    folder.quant_config.write_text("[quantizer]\nblock = 64\n")
    one, two = data(plain(runs))["groups"][0]["curves"]
    assert one["look"]["dash"] == two["look"]["dash"]
    assert one["look"]["symbol"] != two["look"]["symbol"]


def test_a_label_looks_the_same_in_page_picture_and_plot(plain, runs):
    runs("base")
    for seed in (1, 2):
        for kind in ("mxfp8", "mxfp4"):
            runs(f"{kind} {seed}", kind, seed=seed)
            runs(f"{kind} {seed} all", f"linear_{kind}", seed=seed, gemms="all")
    curves = data(plain(runs))["groups"][0]["curves"]
    on_page = {curve["label"]: curve["look"] for curve in curves}
    gaps = data(plain(runs))["groups"][0]["gaps"]
    assert {gap["label"]: gap["look"] for gap in gaps}.items() <= on_page.items()
    for folders in (runs.root.iterdir(), [runs.root / "mxfp4 1 all"]):
        _, plotted = of_runs(RunFolder(folder) for folder in folders)
        for curve in plotted:
            light, symbol = on_page[curve.label]["light"], on_page[curve.label]["symbol"]
            assert (curve.look.light, curve.look.symbol.plotly) == (light, symbol)


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        (Evidence((0.1,), 0.1), "10.0% less"),
        (Evidence((-0.35,), -0.35), "35.0% more"),
        (Evidence((-0.3, -0.4), -0.35, -0.4, -0.3), "35.0% more [30.0, 40.0]"),
        (Evidence((0.1, -0.4), -0.15, -0.4, 0.1), "15.0% more [10.0% less, 40.0% more]"),
        (Evidence((0.1, 0.2), 0.15, 0.1, 0.2), "15.0% less [10.0, 20.0]"),
        (Evidence((-1e-9,), -1e-9), "0.0%"),
        (None, NOTHING),
    ],
)
def test_memory_is_less_or_more_and_never_negative(saved, text):
    assert memory(saved) == text


def test_the_maps_of_operands_are_there_with_the_range_that_they_share(plain, runs):
    runs("base")
    runs("one", "mxfp4", seed=1)
    runs("two", "mxfp4", seed=2)
    html = plain(runs)
    (group,) = json.loads(unpacked(html, "maps"))
    (found,) = group["maps"]["mxfp4"]
    assert found["title"] == "fprop.x underflow"
    assert (found["x"], found["y"], found["z"]) == ([1], ["0"], [[0.02]])
    assert group["ranges"] == {"underflow": [0.02, 0.02]}
    assert "underflow 2.00% to 2.00%" in html


def test_no_run_at_all_is_still_a_page(plain, runs):
    runs("one").result.unlink()
    html = plain(runs)
    assert "No run ended successfully" in html
    assert "unfinished" in html


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((), NOTHING),
        ((0.01,), "+1.00%"),
        ((-0.01, -0.02), f"{MINUS}1.50% [{MINUS}7.85, +4.85]"),
        ((float("nan"), 0.1), "not finite"),
    ],
)
def test_a_relative_difference_as_it_is_shown(values, text):
    (found,) = evidence([values])
    assert shown(found) == text


def test_a_difference_that_was_not_seen_says_what_would_have_been():
    doubtful, sure, single = evidence([(-0.01, -0.02), (0.5, 0.501), (0.1,)])
    assert unseen(doubtful) == "no difference seen; 2 seeds would detect 7.04%"
    assert unseen(sure) == unseen(single) == unseen(None) == ""


def test_a_correction_is_named_where_an_interval_alone_says_otherwise():
    alone = (0.006, 0.008, 0.0105)
    corrected, *_ = evidence([alone, (0.1, -0.1, 0.02), (0.1, -0.1, -0.02)])
    assert corrected.low > 0
    assert unseen(corrected).startswith("no difference seen after Holm correction; 3 seeds")
    assert unseen(evidence([alone])[0]) == ""


def test_a_forest_plot_goes_by_format_then_by_gap(runs):
    for mode, loss in {"linear_mxfp8": 6.1, "mxfp4": 6.1, "linear_mxfp4": 6.2}.items():
        runs(mode, mode, loss=loss)
    runs("bf16", loss=6.0)
    (group,), _ = compare(collect([runs.root])[0])
    assert [row.variant for row in group.forest] == ["mxfp4", "linear_mxfp4", "linear_mxfp8"]


def test_a_number_has_its_deviation_where_there_is_one():
    assert number(Spread.over([1.0]), ".1f") == "1.0"
    assert number(Spread.over([1.0, 3.0]), ".1f") == "2.0 ± 1.4"
