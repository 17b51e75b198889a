"""The picture of a ranking."""

import re
from dataclasses import replace

import pytest
from mqo.quant.subsets import Change
from mqo.sensitivity import measure
from mqo.sensitivity.picture import MOST, draw

pytest.importorskip("matplotlib")


@pytest.fixture
def result(facts, monkeypatch, patched):
    monkeypatch.setattr(measure, "run", lambda *rest, **watching: dict(facts))
    model = type("Model", (), {"name": "one", "folder": "folder"})
    return measure.measure(patched.tree, model, None, "mxfp4", "block", "gradient", {})


def texts(path):
    return re.findall(r"<!-- (.*?) -->", path.read_text())


def test_it_names_each_row_from_the_largest_to_the_smallest(result, tmp_path):
    draw(result, tmp_path / "a.svg")
    names = [row.name for row in result.changes]
    assert [text for text in texts(tmp_path / "a.svg") if text in names] == names
    assert result.title in texts(tmp_path / "a.svg")


def test_of_many_rows_the_first_are_drawn(result, tmp_path):
    rows = tuple(Change(f"layer{n}", (), 1, 0.0, 0.0, 1 / (n + 1)) for n in range(MOST + 5))
    draw(replace(result, changes=rows), tmp_path / "a.svg")
    drawn = texts(tmp_path / "a.svg")
    assert f"layer{MOST - 1}" in drawn and f"layer{MOST}" not in drawn
    assert f"{result.title} ({MOST} of {MOST + 5})" in drawn
