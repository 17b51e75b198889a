"""Pictures of runs and of comparisons."""

import json
from dataclasses import asdict

import pytest
from mqo.errors import RunError
from mqo.launch.config import resolve
from mqo.launch.run import Result
from mqo.report.collect import collect
from mqo.report.colors import look
from mqo.report.compare import compare
from mqo.report.looks import PAGES, shaded
from mqo.report.pictures import draw, plot, plot_operands
from mqo.runs import RunFolder

Axes = pytest.importorskip("matplotlib.axes").Axes


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "a run")
    folder.root.mkdir()
    resolve("llama32-1b", "wikipedia", "bf16", "smoke").write(folder)
    folder.quant_config.write_text('[asked]\nfprop = "mxfp8"\n')
    result = Result(str(folder.root), 2, 7.9, 7.8, 4096, 9.0, {"fprop": "mxfp8"})
    folder.result.write_text(json.dumps(asdict(result)))
    rows = [(1, "lm loss", 8.3), (2, "lm loss", 7.9), (2, "lm loss validation", 7.8)]
    lines = [json.dumps({"iteration": i, "name": n, "value": v}) for i, n, v in rows]
    folder.metrics.write_text("\n".join(lines) + "\n")
    return folder


def test_the_plot_names_the_run_and_chance(run, tmp_path):
    plot([run], tmp_path / "made" / "loss.svg")
    picture = (tmp_path / "made" / "loss.svg").read_text()
    for text in (
        "bf16 (unquantized)",
        "llama32-1b on wikipedia, smoke, fp32",
        "chance, ln V",
        "validation loss",
    ):
        assert f"<!-- {text}" in picture


def test_runs_with_other_options_are_told_apart(run, tmp_path):
    options = '[quantizer]\nblock = 64\n[schedule]\nfprop = "mxfp8 until 9, then none"\n'
    options += '[layers]\nexclude = ["qk:*"]\n'
    run.quant_config.write_text(options)
    config = json.loads(run.config.read_text())
    config["quantization"]["schedule"] = ["fprop: mxfp8 until 9, then none"]
    run.config.write_text(json.dumps(config))
    plot([run], tmp_path / "loss.svg")
    picture = (tmp_path / "loss.svg").read_text()
    assert "bf16, fprop: mxfp8 until 9, then none, block 64, without qk:*" in picture


def test_a_png_is_a_png(run, tmp_path):
    plot([run, run], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_student_without_a_loss_on_its_text_is_drawn_by_its_validation(run, tmp_path):
    run.metrics.write_text(run.metrics.read_text().replace('"lm loss"', '"kd loss"'))
    plot([run], tmp_path / "loss.svg")
    assert "<!-- bf16 (unquantized)" in (tmp_path / "loss.svg").read_text()


def test_a_run_without_a_loss_is_refused(run, tmp_path):
    run.metrics.unlink()
    with pytest.raises(RunError, match=r"metrics\.jsonl"):
        plot([run], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.parametrize("name", ["loss.xyz", "loss"])
def test_another_ending_is_refused_with_those_that_there_are(run, tmp_path, name):
    with pytest.raises(RunError, match=r"\.png, \.svg or \.pdf"):
        plot([run], tmp_path / "made" / name)
    assert not (tmp_path / "made").exists()


def test_more_curves_than_can_be_told_apart_are_refused(run, tmp_path):
    with pytest.raises(RunError, match="9 curves"):
        plot([run] * 9, tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


@pytest.fixture
def drawn(monkeypatch):
    """What matplotlib was told of each line and each band: (panel, steps, values, style)."""
    told = {"plot": [], "fill_between": []}

    def noted(name):
        original = getattr(Axes, name)

        def note(self, x, *values, **style):
            told[name].append((self.get_subplotspec().rowspan.start, x, *values, style))
            return original(self, x, *values, **style)

        return note

    for name in told:
        monkeypatch.setattr(Axes, name, noted(name))
    return told


def test_the_last_step_has_one_point_that_of_the_final_validation(run, drawn, tmp_path):
    with run.metrics.open("a") as lines:
        lines.write(json.dumps({"iteration": 2, "name": "lm loss validation", "value": 7.7}) + "\n")
    plot([run], tmp_path / "loss.png")
    _, (_, steps, losses, _) = drawn["plot"]
    assert (steps, losses) == ((2,), (7.7,))


def test_colors_are_the_formats_and_equal_names_differ_in_lightness_or_marker(run, drawn, tmp_path):
    plot([run, run], tmp_path / "loss.png")
    styles = [style for *_, style in drawn["plot"]]
    first, second = styles[2:]
    assert first["color"] in shaded(look({"fprop": "mxfp8"}).light, PAGES["light"])
    assert (first["color"], first["marker"]) != (second["color"], second["marker"])
    assert first["linestyle"] == second["linestyle"]


def test_seeds_of_one_mode_are_one_curve_with_their_range(runs, drawn, tmp_path):
    folders = [runs(f"{seed}", seed=seed, loss=6 + seed) for seed in (1, 2, 3)]
    folders += [runs(f"mxfp4 {seed}", "mxfp4", seed=seed, loss=6.5 + seed) for seed in (1, 2)]
    plot(folders, tmp_path / "loss.png")
    assert [panel for panel, *_ in drawn["plot"]] == [0, 0, 1, 1, 2, 2]
    (panel, steps, low, high, _) = drawn["fill_between"][-2]
    assert (panel, steps, low, high) == (2, (200,), (7.0,), (9.0,))
    *_, apart, _ = drawn["plot"][3]
    assert apart[-1] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("spelling", ["--seed {}", "--seed={}"])
def test_seeds_are_one_curve_if_another_flag_has_the_value_of_one(runs, drawn, tmp_path, spelling):
    words = [("--log-interval", "2", *spelling.format(seed).split()) for seed in (1, 2)]
    folders = [runs(str(n), flags=flags) for n, flags in enumerate(words)]
    plot(folders, tmp_path / "loss.png")
    assert [panel for panel, *_ in drawn["plot"]] == [0, 1]


def test_runs_of_two_configurations_say_which_in_their_labels(runs, tmp_path):
    plot([runs("a"), runs("b", dataset="dolma")], tmp_path / "loss.svg")
    picture = (tmp_path / "loss.svg").read_text()
    for name in ("wikipedia", "dolma"):
        assert f"<!-- bf16 (unquantized), llama32-1b on {name}, smoke, fp32" in picture


def test_other_flags_are_another_curve(runs, drawn, tmp_path):
    folders = [runs("a", seed=1), runs("b", seed=2, flags=("--lr", "0.5"))]
    plot(folders, tmp_path / "loss.png")
    assert len([panel for panel, *_ in drawn["plot"] if panel == 0]) == 2


def test_a_comparison_of_many_modes_shows_eight_of_them(runs, drawn, tmp_path):
    kinds = ("mxfp8", "mxfp4", "hifp8", "nvfp4")
    runs("base")
    for mode in (f"{family}{kind}" for kind in kinds for family in ("", "linear_", "FA_")):
        runs(mode, mode)
    (group,), _ = compare(collect([runs.root])[0])
    draw(group, tmp_path / "made")
    colors = {style["color"] for panel, *_, style in drawn["plot"] if panel == 0}
    assert len([panel for panel, *_ in drawn["plot"] if panel == 0]) == 8
    assert {look({}).light, *(look({"fprop": kind}).light for kind in kinds)} == colors
    assert "8 of 13 modes" in (tmp_path / "made.svg").read_text()


def test_operands_of_one_mode_are_drawn_over_its_seeds(runs, tmp_path):
    folders = [runs(f"{seed}", "mxfp4", seed=seed) for seed in (1, 2)]
    plot_operands(folders, tmp_path / "made" / "operands.svg")
    picture = (tmp_path / "made" / "operands.svg").read_text()
    for text in ("fprop.x", "underflow", "share", "mxfp4, llama32-1b"):
        assert f"<!-- {text}" in picture or text in picture


def test_operands_of_two_modes_or_of_none_are_refused(runs, tmp_path):
    bare = runs("bf16")
    with pytest.raises(RunError, match="2 modes"):
        plot_operands([runs("mxfp4", "mxfp4"), bare], tmp_path / "made.png")
    bare.metrics.write_text('{"iteration": 1, "name": "lm loss", "value": 7.0}\n')
    with pytest.raises(RunError, match="--record-every"):
        plot_operands([bare], tmp_path / "made.png")
    with pytest.raises(RunError, match=r"\.png, \.svg or \.pdf"):
        plot_operands([bare], tmp_path / "made.txt")
    assert list(tmp_path.glob("made*")) == []
