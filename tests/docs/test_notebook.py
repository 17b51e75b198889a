"""The notebook: its cells run, one after the other, and train."""

import json

import pytest
from mqo.project import Project

PAGE = Project.here().root / "docs/tutorials/quantize_a_model.ipynb"


@pytest.mark.slow
def test_its_cells_run_and_quantized_models_learn(monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads(PAGE.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert {str(cell.get("outputs", [])) for cell in cells} == {"[]"}
    assert sum("steps=150" in cell for cell in code) == 1
    names = {}
    for cell in code:
        exec(compile(cell.replace("steps=150", "steps=60"), str(PAGE), "exec"), names)
    losses = names["losses"]
    assert set(losses) == {"unquantized", "mxfp4", "nvfp4"}
    assert all(values[-1] < 0.8 * values[0] for values in losses.values())
    assert len({values[-1] for values in losses.values()}) == 3
    assert "wgrad.grad" in capsys.readouterr().out
