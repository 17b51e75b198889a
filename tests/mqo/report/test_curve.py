"""The loss plot."""

import json

import pytest
from mqo.errors import RunError
from mqo.report.colors import look
from mqo.report.curve import plot
from mqo.runs import RunFolder

Axes = pytest.importorskip("matplotlib.axes").Axes


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "a run")
    folder.root.mkdir()
    names = {"model": {"name": "m"}, "dataset": {"name": "d"}, "training": {"name": "smoke"}}
    asked = {"mode": "bf16", "gemms": "fprop"}
    config = {"experiment": names | {"dtype": "fp32"}, "quantization": asked}
    folder.config.write_text(json.dumps(config))
    folder.quant_config.write_text('[asked]\nfprop = "mxfp8"\n')
    folder.result.write_text(json.dumps({"vocab_size": 4096}))
    rows = [(1, "lm loss", 8.3), (2, "lm loss", 7.9), (2, "lm loss validation", 7.8)]
    lines = [json.dumps({"iteration": i, "name": n, "value": v}) for i, n, v in rows]
    folder.metrics.write_text("\n".join(lines) + "\n")
    return folder


def test_the_plot_names_the_run_and_chance(run, tmp_path):
    plot([run], tmp_path / "made" / "loss.svg")
    picture = (tmp_path / "made" / "loss.svg").read_text()
    for text in ("m d bf16 (unquantized), smoke, fp32", "chance, ln V", "validation loss"):
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
    said = "m d bf16, block 64, fprop mxfp8 until 9, then none, without qk:*, smoke, fp32"
    assert said in picture


def test_a_png_is_a_png(run, tmp_path):
    plot([run, run], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_student_without_a_loss_on_its_text_is_drawn_by_its_validation(run, tmp_path):
    run.metrics.write_text(run.metrics.read_text().replace('"lm loss"', '"kd loss"'))
    plot([run], tmp_path / "loss.svg")
    assert "<!-- m d bf16 (unquantized), smoke, fp32" in (tmp_path / "loss.svg").read_text()


def test_a_run_without_a_loss_is_refused(run, tmp_path):
    run.metrics.unlink()
    with pytest.raises(RunError, match="recorded no loss"):
        plot([run], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.parametrize("name", ["loss.xyz", "loss"])
def test_another_ending_is_refused_with_those_that_there_are(run, tmp_path, name):
    with pytest.raises(RunError, match=r"\.png, \.svg or \.pdf"):
        plot([run], tmp_path / "made" / name)
    assert not (tmp_path / "made").exists()


@pytest.fixture
def drawn(run, tmp_path, monkeypatch):
    """A function that plots and gives, for each curve, what matplotlib was told."""
    curves = []

    def note(self, x, y, **style):
        curves.append((x, y, style))
        return draw(self, x, y, **style)

    draw = Axes.plot
    monkeypatch.setattr(Axes, "plot", note)

    def curves_of(*runs):
        curves.clear()
        plot(runs, tmp_path / "loss.png")
        return list(curves)

    return curves_of


def test_the_last_step_has_one_point_that_of_the_final_validation(run, drawn):
    with run.metrics.open("a") as lines:
        lines.write(json.dumps({"iteration": 2, "name": "lm loss validation", "value": 7.7}) + "\n")
    _, (steps, losses, _) = drawn(run)
    assert (steps, losses) == ([2], [7.7])


def test_colors_are_the_reports_and_equal_ones_have_points_of_other_shapes(run, drawn):
    types = {"fprop": "mxfp8"}
    styles = [style for *_, style in drawn(run, run)]
    assert {style["color"] for style in styles} == {look(types).light}
    assert styles[1]["marker"] != styles[3]["marker"]
    run.quant_config.write_text('[asked]\nfprop = "none"\n')
    assert {style["color"] for *_, style in drawn(run)} == {look({}).light}
