"""The notebook: its cells run, one after the other, and train."""

import json

import pytest
from mqo.project import Project

SHORTER = {"LENGTH, DISTANCE = 32, 64, 4, 48, 8": "LENGTH, DISTANCE = 32, 64, 4, 24, 8"}
SHORTER |= {"steps=150": "steps=60"}
PAGE = Project.here().root / "docs/tutorials/quantize_a_model.ipynb"


@pytest.mark.slow
def test_its_cells_run_and_quantized_models_learn(monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert {str(cell.get("outputs", [])) for cell in cells} == {"[]"}
    text = "\0".join(code)
    for long, short in SHORTER.items():
        assert text.count(long) == 1
        text = text.replace(long, short)
    names = {}
    for cell in text.split("\0"):
        exec(compile(cell, str(PAGE), "exec"), names)
    losses = names["losses"]
    assert set(losses) == {"unquantized", "mxfp4", "nvfp4"}
    assert all(values[-1] < 0.8 * values[0] for values in losses.values())
    assert len({values[-1] for values in losses.values()}) == 3
    assert "wgrad.grad" in capsys.readouterr().out
