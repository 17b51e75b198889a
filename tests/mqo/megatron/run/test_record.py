import contextlib
import json
import math
import pickle
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mqo.megatron.device import HAS_CUDA, accelerator
from mqo.megatron.run.checkpoints import CheckpointError
from mqo.megatron.run.files import RunFiles, run_folder
from mqo.megatron.run.guard import GuardError
from mqo.megatron.run.record import recorded, write_stats
from mqo.quant.record import QuantRecord
from torch.distributed.checkpoint import CheckpointException


class Writer:
    """Upstream's TensorBoard writer, as far as it is used."""

    def __init__(self):
        self.scalars = []

    def add_scalar(self, tag, value, iteration, *args, **kwargs):
        self.scalars.append((tag, value, iteration, *args, *kwargs.items()))


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def metrics(folder):
    return [strict(line) for line in RunFiles(folder).metrics.read_text().splitlines()]


# -- without a run folder ----------------------------------------------------------------------


def test_without_a_run_folder_nothing_is_touched(run, tmp_path):
    writer = Writer()
    with recorded(writer):
        writer.add_scalar("loss", 1.0, 1)
    assert run_folder() is None
    assert "add_scalar" not in vars(writer)
    assert list(tmp_path.iterdir()) == []


def test_without_a_run_folder_errors_pass(run):
    with pytest.raises(ZeroDivisionError), recorded(None):
        raise ZeroDivisionError


@pytest.mark.parametrize("code", [None, 0, 1])
@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_only_a_training_that_was_not_left_early_notes_its_end(run, monkeypatch, code, local_rank):
    """One process of each node does."""
    folder = run()
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with contextlib.suppress(SystemExit), recorded(None):
        if code is not None:
            raise SystemExit(code)
    ended = RunFiles(folder).ended
    assert ended.exists() == (code is None and local_rank == "0")
    assert not ended.exists() or strict(ended.read_text()) == {"steps": 0}


# -- metrics -----------------------------------------------------------------------------------


def test_each_scalar_is_a_line_and_reaches_tensorboard_too(run):
    folder, writer = run(), Writer()
    with recorded(writer):
        writer.add_scalar("lm loss", 2.5, 1)
        writer.add_scalar("grad-norm", torch.tensor(0.75), 2)
    assert metrics(folder) == [
        {"iteration": 1, "name": "lm loss", "value": 2.5},
        {"iteration": 2, "name": "grad-norm", "value": 0.75},
    ]
    assert [tag for tag, *_ in writer.scalars] == ["lm loss", "grad-norm"]


# Many values in one run: what a run records at its start and end takes a second.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=5)
@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=40))
def test_values_come_back_bit_for_bit(run, values):
    folder, writer = run(), Writer()
    RunFiles(folder).metrics.unlink(missing_ok=True)
    with recorded(writer):
        for step, value in enumerate(values):
            writer.add_scalar("x", value, step)
    read = [row["value"] for row in metrics(folder)]
    assert [struct.pack("d", value) for value in read] == [struct.pack("d", x) for x in values]


@pytest.mark.parametrize(("value", "text"), [("nan", "nan"), ("inf", "inf"), ("-inf", "-inf")])
def test_what_json_has_no_number_for_is_text(run, value, text):
    folder, writer = run(), Writer()
    with recorded(writer):
        writer.add_scalar("x", torch.tensor(float(value)), 1)
    assert metrics(folder) == [{"iteration": 1, "name": "x", "value": text}]


def test_upstreams_second_copy_over_samples_is_left_out(run):
    folder, writer = run(), Writer()
    with recorded(writer):
        writer.add_scalar("lm loss", 1.0, 1)
        writer.add_scalar("lm loss vs samples", 1.0, 8)
    assert [row["name"] for row in metrics(folder)] == ["lm loss"]
    assert len(writer.scalars) == 2


def test_a_resumed_run_appends(run):
    folder = run()
    for i in range(2):
        writer = Writer()
        with recorded(writer):
            writer.add_scalar("x", float(i), i)
    assert [row["value"] for row in metrics(folder)] == [0.0, 1.0]


# -- statistics --------------------------------------------------------------------------------


def test_the_statistics_say_type_calls_and_sqnr(run, quantized):
    folder = run(fprop="mxfp8")
    with recorded(None):
        quantized("fprop", "mxfp8", "x", "weight")
        quantized("fprop", "mxfp8", "x")
    weight, x = strict(RunFiles(folder).quant_stats.read_text())
    assert {k: x[k] for k in ("site", "layer", "operand", "quant_type", "calls", "measured")} == {
        "site": "fprop",
        "layer": "layers.0",
        "operand": "x",
        "quant_type": "mxfp8",
        "calls": 2,
        "measured": 2,
    }
    assert weight["operand"] == "weight"
    signal = sum(i**2 for i in range(32))
    noise = 32 * 0.25
    # The energies are sums of float64 squares of norms: correct to about 1e-15.
    assert x["sqnr_db"] == pytest.approx(10 * math.log10(signal / noise), rel=1e-12)


@pytest.mark.parametrize(
    ("signal", "noise", "sqnr"),
    [(1.0, 0.0, "inf"), (0.0, 0.0, None), (math.nan, 1.0, "nan"), (math.inf, 1.0, "inf")],
)
def test_statistics_without_a_number_are_still_json(tmp_path, signal, noise, sqnr):
    path = tmp_path / "stats.json"
    write_stats(path, [QuantRecord("qk", "l", "query", "mxfp8", 1, 1, signal, noise)])
    (row,) = strict(path.read_text())
    assert row["sqnr_db"] == sqnr
    assert row["signal"] == (signal if math.isfinite(signal) else str(signal))


# -- device ------------------------------------------------------------------------------------


def test_the_peak_of_memory_is_written_in_bytes(run):
    folder = run()
    with recorded(None):
        pass
    found = strict(RunFiles(folder).device.read_text())
    assert found["device"] == accelerator.get_device_name()
    (peak,) = found["peak_memory"]
    assert 1e8 < peak < 1e12 or HAS_CUDA  # what holds torch has 100 MB, and no machine has 1 TB


# -- failures ----------------------------------------------------------------------------------


def test_a_failure_leaves_its_text_and_goes_on(run):
    folder = run()
    with pytest.raises(ValueError, match="too hot"), recorded(None):
        raise ValueError("too hot")
    assert RunFiles(folder).failure.read_text() == "ValueError: too hot\n"
    assert not RunFiles(folder).quant_stats.exists()
    assert not RunFiles(folder).device.exists()


@pytest.mark.parametrize("wrapped", [True, False])
def test_what_torch_could_not_load_is_left_in_plain_words(run, wrapped):
    folder, found = run(), pickle.UnpicklingError("GLOBAL posix.system is blocked\nSet ...=False")
    if wrapped:  # as the sharded loader gathers the errors of all ranks
        found = CheckpointException("load", {0: (CheckpointError("x would run"), None)})
    with pytest.raises(CheckpointError), recorded(None):
        raise found
    (line,) = RunFiles(folder).failure.read_text().splitlines()
    assert line.startswith("CheckpointError: ")
    assert ("x would run" if wrapped else "posix.system") in line


def test_a_run_that_did_not_quantize_as_asked_fails_at_its_end(run):
    folder = run(qk="mxfp8")
    with pytest.raises(GuardError, match=r"at the end.*qk"), recorded(None):
        pass
    assert "GuardError" in RunFiles(folder).failure.read_text()
    assert RunFiles(folder).quant_stats.exists()


@pytest.mark.parametrize("code", [0, None])
def test_an_early_end_without_error_is_recorded_as_an_end(run, quantized, code):
    folder = run(fprop="mxfp8")
    with pytest.raises(SystemExit), recorded(None):
        quantized("fprop", "mxfp8", "x", "weight")
        raise SystemExit(code)
    assert len(strict(RunFiles(folder).quant_stats.read_text())) == 2
    assert not RunFiles(folder).failure.exists()


def test_an_early_end_does_not_escape_the_guard(run):
    run(qk="mxfp8")
    with pytest.raises(GuardError), recorded(None):
        raise SystemExit(0)


def test_an_end_with_an_error_code_is_a_failure(run):
    folder = run()
    with pytest.raises(SystemExit), recorded(None):
        raise SystemExit(17)
    assert RunFiles(folder).failure.read_text() == "SystemExit: 17\n"


def test_the_first_rank_of_a_group_writes(run, quantized, one_rank):
    folder = run(fprop="mxfp8")
    with recorded(None):
        quantized("fprop", "mxfp8", "x", "weight")
    assert len(strict(RunFiles(folder).quant_stats.read_text())) == 2


def test_another_rank_leaves_the_files_to_the_first_but_tells_its_failure(
    run, one_rank, monkeypatch
):
    folder = run(qk="mxfp8")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    with pytest.raises(GuardError), recorded(None):
        pass
    assert not RunFiles(folder).quant_stats.exists()
    assert RunFiles(folder).failure.read_text().startswith("GuardError: ")


def test_the_first_failure_is_kept_for_the_others_follow_from_it(run):
    folder = run()
    for error in (ValueError("too hot"), RuntimeError("Connection reset by peer")):
        with pytest.raises(type(error)), recorded(None):
            raise error
    assert RunFiles(folder).failure.read_text() == "ValueError: too hot\n"


def test_a_failure_that_cannot_be_written_is_still_raised(run):
    folder = run()
    RunFiles(folder).failure.mkdir()
    with pytest.raises(ValueError, match="too hot"), recorded(None):
        raise ValueError("too hot")
