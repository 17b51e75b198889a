"""Many runs side by side, and the same one again: real runs."""

import json
import math
import shutil

import pytest
from mqo.errors import DataError, RunError
from mqo.launch.config import resolve
from mqo.launch.own_data import of_options
from mqo.launch.rerun import BitEqual, compare, rerun
from mqo.runs import TRAIN_LOSS, RunFolder
from mqo.sweep.state import SweepFolder

pytest.importorskip("torch")
from .real_runs import TINY, launched, losses, run, stats_of, tracked
from .vendored_tree import PROJECT as PROJECT

ROUNDED = """
import torch
from mqo.quant import quantizer


@quantizer("mine", options={"bits": 3})
def mine(x, context):
    mantissa, exponent = torch.frexp(x)
    levels = 2 ** context.options["bits"]
    return torch.ldexp(torch.round(mantissa * levels) / levels, exponent)
"""


@pytest.mark.slow
def test_a_sweep_trains_each_value_of_an_option_and_goes_on_where_it_ended(tmp_path):
    file, folder = tmp_path / "mine.py", SweepFolder(tmp_path / "sweep")
    file.write_text(ROUNDED)
    sweep = ("-m", "mqo", "sweep", "--models", "llama32-1b", "--datasets", "wikipedia")
    sweep += ("--modes", "bf16,linear_mine", "--plugin", file, "--axis", "mine.bits=2,23")
    sweep += ("-o", folder.root, "--", *TINY)
    done = launched(*sweep)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 done" in done.stdout
    entries = folder.read()
    assert {entry.state for entry in entries} == {"done"}
    arms = {entry.name.partition("_wikipedia_")[2]: folder.run_of(entry) for entry in entries}
    assert list(arms) == ["bf16", "linear_mine_mine.bits-2", "linear_mine_mine.bits-23"]
    plain, coarse, fine = map(losses, arms.values())
    assert coarse != plain
    # With as many bits as float32 has nothing is rounded.
    assert fine == plain
    assert len(plain[0]) == 6
    assert not list(folder.root.glob("*/checkpoints"))
    again = launched(*sweep)
    assert "3 of 3 runs are done already and skipped" in again.stdout
    assert folder.read() == entries


def test_a_replay_is_bit_equal(start, checkout_with, tmp_path):
    run = start("FA_linear_mxfp8", flags=TINY)
    found = rerun(checkout_with(runs=tmp_path), run, report=lambda text: None)
    assert found == BitEqual(found.run, 6)
    again = RunFolder(tmp_path / found.run)
    assert losses(again) == losses(run)
    assert stats_of(again) == stats_of(run)
    assert again.checkpoints.exists()
    # What tells that it could differ: another bit in what the original recorded.
    rows = run.metrics.read_text().splitlines(keepends=True)
    at = next(
        n for n, row in enumerate(rows) if f'"{TRAIN_LOSS}"' in row and '"iteration": 4' in row
    )
    changed = RunFolder(tmp_path / "changed")
    changed.root.mkdir()
    row = json.loads(rows[at])
    rows[at] = json.dumps(row | {"value": math.nextafter(row["value"], 0)}) + "\n"
    changed.metrics.write_text("".join(rows))
    assert compare(changed, again).step == 4


@pytest.mark.slow
def test_a_run_on_own_text_is_replayed_also_without_the_index(checkout_with, tmp_path):
    sentences = [f"Miller {n} weighs {n * 37 % 101} sacks at dawn." for n in range(1000)]
    text = tmp_path / "tales.txt"
    text.write_text("\n\n".join(sentences))
    project = checkout_with(runs=tmp_path / "runs", own_data=tmp_path / "data")
    data = of_options(project, [text], None, None)
    config = resolve("llama32-1b", None, "linear_mxfp8", "tiny", **data.fields)
    original = run(project, config)
    assert original.root.name.endswith("llama32-1b_tales_linear_mxfp8_tiny")
    trained, valid = losses(original)
    assert trained[-1][1] < trained[0][1] < math.log(4096)
    assert valid
    folder = data.data_prefix.parent
    shutil.rmtree(folder)
    found = rerun(project, original, report=lambda line: None)
    assert found == BitEqual(found.run, 8)
    shutil.rmtree(folder)
    text.write_text("Another tale.\n\n" * 1000)
    with pytest.raises(DataError, match=f"{text} has changed"):
        rerun(project, original, report=lambda line: None)


@pytest.mark.slow
def test_a_replay_goes_on_from_the_checkpoint_that_its_run_had_loaded(
    start, checkout_with, tmp_path
):
    """Not from what that run saved in the same folder later."""
    rest = {"checkpoint": tmp_path / "checkpoint"}
    start("bf16", flags=(*TINY, "--save-interval", "2", "--exit-interval", "2"), **rest)
    resumed = start("bf16", flags=TINY, **rest)
    assert tracked(tmp_path / "checkpoint") == 6
    place = checkout_with(runs=tmp_path / "runs")
    found = rerun(place, resumed, report=lambda text: None)
    assert found == BitEqual(found.run, 4)
    assert sorted(p.name for p in (tmp_path / "checkpoint").glob("iter_*")) == [
        "iter_0000002",
        "iter_0000006",
    ]
    next((tmp_path / "checkpoint" / "iter_0000002").glob("*.distcp")).unlink()
    with pytest.raises(RunError, match=r"iter_0000002/.*\.distcp is gone"):
        rerun(place, resumed)
