"""The table of simulated layouts, against the formulas and against the simulation."""

import csv
from dataclasses import replace

import pytest
from mqo.launch.config import Cluster, resolve
from mqo.launch.machine import imagined
from mqo.launch.plan import layout_of
from mqo.matrix import tables
from mqo.megatron.simulation.rows import KINDS
from mqo.overlay.series import Series
from mqo.scale.memory import CONTEXT, stage_memory
from mqo.scale.simulated import TABLE, simulated_need
from mqo.simulate.jobs import RunJob, simulate
from mqo.simulate.result import needed

from .arithmetic import of_mode

MODES = {"fused": "FA_linear_mxfp8", "chunked": "qk_pv_mxfp8"}
with TABLE.open(encoding="utf-8", newline="") as file:
    ROWS = list(csv.DictReader(file))


def case_of(row):
    """The model, training, arithmetic and layout of a row."""
    training = tables.trainings()["standard"]
    sizes = {name: int(row[name]) for name in ("global_batch", "micro_batch", "sequence")}
    arithmetic = of_mode(tables.modes()[MODES[row["attention"]]])
    layout = layout_of(row["flags"].split(), int(row["gpus"]))
    return tables.models()[row["model"]], training.model_copy(update=sizes), arithmetic, layout


def test_every_row_is_found_and_is_another_one():
    found = [simulated_need(*case_of(row), "bf16") for row in ROWS]
    assert found == [int(row["bytes"]) for row in ROWS]
    assert len({tuple(list(row.values())[:8]) for row in ROWS}) == len(ROWS) > 20
    assert all(int(row["bytes"]) >= sum(int(row[kind]) for kind in KINDS) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['gpus']}")
def test_the_formulas_are_a_little_above_the_simulation(row):
    case = case_of(row)
    need = max(stage_memory(*case, stage).total for stage in range(case[-1].pipeline))
    above = need - CONTEXT - int(row["bytes"])
    assert 0 < above < 0.06 * int(row["bytes"])


def test_other_sizes_are_not_found():
    model, training, arithmetic, layout = case_of(ROWS[0])
    longer = training.model_copy(update={"sequence": 4 * training.sequence})
    assert simulated_need(model, longer, arithmetic, layout, "bf16") is None
    assert simulated_need(model, training, arithmetic, layout, "fp32") is None
    other = model.model_copy(update={"num_layers": 99})
    assert simulated_need(other, training, arithmetic, layout, "bf16") is None


def test_a_hybrid_model_of_the_same_layers_is_found_in_layouts_that_recompute_none():
    for row in ROWS:
        model, *others = case_of(row)
        hybrid = model.model_copy(update={"pattern": "".join(model.blocks)})
        assert simulated_need(hybrid, *others, "bf16") == int(row["bytes"])
    *sizes, layout = others
    full = replace(layout, recompute="full")
    assert simulated_need(hybrid, *sizes, full, "bf16") is None
    for pattern in (f"{hybrid.pattern}-", f"{hybrid.pattern[:2]}|{hybrid.pattern[2:]}"):
        other = hybrid.model_copy(update={"pattern": pattern})
        assert simulated_need(other, *others, "bf16") is None


@pytest.mark.parametrize(
    "model_class",
    [
        pytest.param("gpt", marks=pytest.mark.slow),
        # A hybrid model has a GPT's bytes: simulate/test_against_real.py.
        pytest.param("hybrid", marks=pytest.mark.heavy),
    ],
)
def test_the_table_is_what_a_simulation_says_today(vendored, checkout_with, tmp_path, model_class):
    row = next(r for r in ROWS if (r["model"], r["attention"]) == ("llama32-1b", "fused"))
    gpus = int(row["gpus"])
    cluster = Cluster(nnodes=gpus // 8, nproc_per_node=8)
    names = ("llama32-1b", "wikipedia", "FA_linear_mxfp8", "standard")
    made = resolve(*names, cluster=cluster, model_class=model_class)
    made = made.with_layout(row["flags"].split())
    project = checkout_with(cache=tmp_path)
    job = RunJob.from_config(made, imagined("h100-80gb", 8), dict(made.quantization.types), 1.0)
    (rank,) = simulate(project, vendored, Series.of_project(project), job, lambda text: None)
    assert needed(rank) == int(row["bytes"])
