"""Pictures fit their canvas: no text, legend or axis beyond its edge, no two on each other."""

import itertools
import warnings

import pytest
from mqo.report import pictures
from mqo.report.curves import Curve
from mqo.report.evidence import Evidence
from mqo.report.fit import wrapped
from mqo.report.looks import looks
from mqo.report.operands import Map
from mqo.report.pictures import Gap, draw_curves, draw_maps, forest
from mqo.report.series import Band

pytest.importorskip("matplotlib")
TYPES = {"fprop": "mxfp4"}
WORDS = "mxfp4-all recipe 508c5a without hadamard, scale_rule rceil, without output_layer "
NAMES = {
    "short": "mxfp4 {}",
    "long": WORDS + "{}",
    "without spaces": 12 * "without_spaces_" + "{}",
    "dollars": 4 * "$a_$ {{100%}} \\frac " + "{}",
}


@pytest.fixture
def figures(monkeypatch):
    """The figures that were drawn, as they were when they were saved. A warning is an error."""
    drawn = []
    save = pictures.save

    def kept(figure, targets):
        figure.draw_without_rendering()
        drawn.append((figure, boxes(figure), figure.bbox.bounds))
        save(figure, targets)

    monkeypatch.setattr(pictures, "save", kept)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield drawn


def boxes(figure):
    """The boxes of a figure's parts that must not touch: axes with their labels, title, legend."""
    parts = [*figure.legends, *(text for text in figure.texts if text.get_text())]
    parts += [text for text in (figure._suptitle, figure._supxlabel) if text and text not in parts]
    return [part.get_window_extent() for part in parts] + [
        axes.get_tightbbox() for axes in figure.axes if axes.get_visible()
    ]


def check(figures, tmp_path):
    (_, parts, (left, bottom, width, height)), *rest = figures
    assert not rest and len(parts) > 1
    for box in parts:
        assert left <= box.x0 and box.x1 <= left + width, box
        assert bottom <= box.y0 and box.y1 <= bottom + height, box
    for one, two in itertools.combinations(parts, 2):
        across = min(one.x1, two.x1) - max(one.x0, two.x0)
        up = min(one.y1, two.y1) - max(one.y0, two.y0)
        assert across < 1 or up < 1, (one, two)
    assert (tmp_path / "made.png").stat().st_size > 5000


def curve(name, its_look):
    band = Band((1, 2, 3), (8.0, 7.0, 6.0), (7.9, 6.9, 5.9), (8.1, 7.1, 6.1))
    return Curve(name, name, its_look, band, band, band, 8.3)


@pytest.mark.parametrize("count", [2, 6, 20])
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_curves_fit(figures, tmp_path, count, name):
    labels = [name.format(n) for n in range(count)]
    known = looks((label, TYPES) for label in labels)
    curves = [curve(*pair) for pair in zip(labels, known, strict=True)]
    draw_curves(curves, name.format("title"), [tmp_path / "made.png"])
    check(figures, tmp_path)
    (figure, *_), *_ = figures
    for axes in figure.axes:  # a long legend makes the picture longer, not the panels flat
        assert axes.get_window_extent().height > 1.2 * figure.dpi


@pytest.mark.parametrize("count", [2, 6, 20])
@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_gaps_fit(figures, tmp_path, count, name):
    labels = [name.format(n) for n in range(count)]
    known = looks((label, TYPES) for label in labels)
    evidence = Evidence((0.1, 0.2), 0.15, 0.1, 0.2)
    gaps = [Gap(label, its_look, evidence) for label, its_look in zip(labels, known, strict=True)]
    forest(gaps, name.format("title"), [tmp_path / "made.png"])
    check(figures, tmp_path)
    (axes,) = figures[0][0].axes
    ticks = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert all(upper.y0 > lower.y1 for upper, lower in itertools.pairwise(ticks))


@pytest.mark.parametrize("count", [1, 6, 12])
def test_maps_fit(figures, tmp_path, count):
    grids = [
        Map(f"fprop.operand_{n}", quantity, (1, 50, 100), (0, 1, 2), ((0.1, 0.2, 0.3),) * 3)
        for n in range(count)
        for quantity in ("sqnr_db", "underflow", "saturation")
    ]
    draw_maps(grids, 2 * WORDS, [tmp_path / "made.png"])
    check(figures, tmp_path)


def test_words_are_kept_and_only_too_long_ones_are_broken():
    figure = pictures.pyplot().figure()
    lines = wrapped(figure, WORDS, 2, 8)
    assert lines.replace("\n", " ") == WORDS.strip() and "\n" in lines
    assert wrapped(figure, "long" * 40, 2, 8).replace("\n", "") == "long" * 40
    assert wrapped(figure, "short", 2, 8) == "short"
    assert wrapped(figure, "", 2, 8) == ""
