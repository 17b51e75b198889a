"""Counting and measuring: when, how well, and over several ranks."""

import math
import pickle
from contextlib import suppress

import pytest
import torch
from mqo.quant.backend import fake_quantize
from mqo.quant.config import current
from mqo.quant.gemms import gemm_operands
from mqo.quant.measurement import merge
from mqo.quant.quantization import PROCESS
from mqo.quant.record import RECORDER, QuantRecord, Recorder
from mqo.quant.rounded import Rounded
from mqo.quant.spec import QuantSpec

from .tensors import normal


def begin(recorder, iteration):
    return recorder.begin_step(iteration, current().every, current().dump)


def record(site="fprop", layer="a", operand="x", kind="mxfp8", **numbers):
    numbers = {"calls": 1, "measured": 1, "signal": 100.0, "noise": 1.0, **numbers}
    return QuantRecord(site, layer, operand, kind, **numbers)


def observe(recorder, original, quantized, layer="a"):
    recorder.observe("fprop", layer, "x", QuantSpec("mxfp8"), -1, original, Rounded(quantized))


def test_every_quantized_operand_is_counted_by_site_layer_operand_and_type():
    for kind, calls in (("mxfp8", 3), ("hifp8", 1)):
        for _ in range(calls):
            q = gemm_operands("qk", kind, None)
            q.lhs(normal(4, 2, 32))
            q.rhs(normal(4, 2, 32))
    assert [(*entry.key, entry.calls) for entry in RECORDER.entries()] == [
        ("qk", "unlabeled", "key", "hifp8", 1),
        ("qk", "unlabeled", "key", "mxfp8", 3),
        ("qk", "unlabeled", "query", "hifp8", 1),
        ("qk", "unlabeled", "query", "mxfp8", 3),
    ]


@pytest.mark.parametrize(
    ("every", "expected"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 3, 6]), (50, [1]), (0, [])]
)
def test_the_first_iteration_is_measured_and_each_multiple(options, every, expected):
    options(f"[record]\nevery = {every}\n")
    recorder, measured = Recorder(), []
    for iteration in range(1, 8):
        begin(recorder, iteration)
        for _ in range(2):
            observe(recorder, torch.ones(4), torch.zeros(4))
        measured += [iteration] if recorder.end_step() else []
    (entry,) = recorder.entries()
    assert measured == expected
    assert (entry.calls, entry.measured) == (14, 2 * len(expected))
    assert (entry.signal, entry.noise) == (8.0 * len(expected), 8.0 * len(expected))


def test_between_steps_nothing_is_measured():
    recorder = Recorder()
    observe(recorder, torch.ones(1), torch.ones(1))
    begin(recorder, 1)
    recorder.end_step()
    observe(recorder, torch.ones(1), torch.ones(1))
    assert recorder.end_step() == []
    assert [(entry.calls, entry.measured) for entry in recorder.entries()] == [(2, 0)]


def test_a_step_is_measured_by_key_over_all_its_micro_batches():
    recorder = Recorder()
    begin(recorder, 1)
    spec, operands = QuantSpec("mxfp4", block=16), []
    for seed in range(3):
        operands.append(normal(4, 32, seed=seed))
        quantized = fake_quantize(operands[-1], spec)
        recorder.observe("qk", "a", "query", spec, -1, operands[-1], Rounded(quantized))
        observe(recorder, torch.ones(1), torch.ones(1), "b")
    linear, attention = recorder.end_step()
    assert (linear.key, attention.key[0]) == (("fprop", "b", "x", "mxfp8"), "qk")
    assert attention.amax == max(x.abs().max().item() for x in operands)
    assert (attention.elements, sum(attention.scales.values())) == (3 * 128, 3 * 8)
    assert recorder.end_step() == []


def test_operands_are_kept_at_the_iterations_that_are_asked_for(options):
    options("[record]\nevery = 0\ndump = [2]\n")
    for iteration in (1, 2, 3):
        PROCESS.begin_step(iteration)
        x = normal(4, 2, 32, seed=iteration).transpose(0, 1).requires_grad_()
        for operand in (x, x + 1):
            gemm_operands("qk", "mxfp8", None).lhs(operand)
        kept = RECORDER.take_dump()
        assert list(kept) == (["qk/unlabeled/query"] if iteration == 2 else [])
        if kept:
            # As it was before, of the first micro-batch, and a copy.
            (tensor,) = kept.values()
            assert tensor.equal(x.detach())
            assert tensor.is_contiguous()
            assert tensor.data_ptr() != x.data_ptr()
            assert not tensor.requires_grad


@pytest.mark.parametrize("fails", [False, True])
def test_an_extra_pass_is_in_no_count_measurement_or_dump(options, fails):
    options("[record]\nevery = 1\ndump = [1]\n")
    PROCESS.begin_step(1)
    before = normal(4, 2, 32, seed=1)
    gemm_operands("qk", "mxfp8", None).lhs(before)
    with suppress(ZeroDivisionError), PROCESS.extra_pass():
        for name in ("lhs", "rhs"):
            getattr(gemm_operands("qk", "mxfp8", None), name)(normal(4, 2, 32, seed=2))
        assert fails == 0 or 1 / 0
    assert (RECORDER.measuring, RECORDER.dumping) == (True, True)
    (measured,) = RECORDER.end_step()
    assert (measured.operand, measured.elements) == ("query", before.numel())
    assert [entry.calls for entry in RECORDER.entries()] == [1]
    assert list(RECORDER.take_dump()) == ["qk/unlabeled/query"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sqnr_is_the_ratio_of_the_energies_of_all_measured_calls(dtype):
    recorder = Recorder()
    begin(recorder, 1)
    pairs = []
    for size, seed in ((3.0, 1), (0.01, 2)):
        x = (size * normal(64, 64, seed=seed)).to(dtype)
        pairs.append((x, (x.float() + 0.01 * size * normal(64, 64, seed=9)).to(dtype)))
        observe(recorder, *pairs[-1])
    signal = sum(x.double().square().sum().item() for x, _ in pairs)
    noise = sum((x.double() - q.double()).square().sum().item() for x, q in pairs)
    (step,) = recorder.end_step()
    (entry,) = recorder.entries()
    assert (step.signal, step.noise) == (entry.signal, entry.noise)
    # The recorder subtracts in float32 (2^-24 relative to x, 1e-5 to an error of 1 %) and takes a
    # square of a root in float64.
    assert entry.signal == pytest.approx(signal, rel=1e-7)
    assert entry.noise == pytest.approx(noise, rel=1e-5)
    assert entry.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-4)


def test_energies_beyond_float32_do_not_overflow():
    recorder = Recorder()
    begin(recorder, 1)
    observe(recorder, torch.full((8,), 1e30), torch.full((8,), 0.9e30))
    assert recorder.end_step()[0].sqnr_db == pytest.approx(20.0, abs=1e-4)


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, 20.0),
        ({"noise": 0.0}, math.inf),
        ({"measured": 0, "signal": 0.0, "noise": 0.0}, None),
        ({"signal": 0.0, "noise": 0.0}, None),
    ],
)
def test_sqnr_without_noise_is_infinite_and_without_signal_is_none(numbers, expected):
    assert record(**numbers).sqnr_db == expected


def test_sqnr_of_a_nan_is_a_nan():
    recorder = Recorder()
    begin(recorder, 1)
    observe(recorder, torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]))
    recorder.end_step()
    assert math.isnan(recorder.entries()[0].sqnr_db)


def test_measuring_records_no_gradient():
    x = normal(4, 32).requires_grad_()
    PROCESS.begin_step(1)
    gemm_operands("fprop", "mxfp8", None).lhs(x)
    RECORDER.observe("fprop", "a", "x", QuantSpec("mxfp8"), -1, x, Rounded(2 * x))
    assert not any(t.requires_grad for tally in RECORDER._tallies.values() for t in tally.step)


def test_reset_forgets_everything():
    observe(RECORDER, torch.ones(1), torch.ones(1))
    assert len(RECORDER.entries()) == 1
    RECORDER.reset()
    assert RECORDER.entries() == []


def test_ranks_merge_by_key_and_their_energies_add():
    merged = merge(
        [
            [record(), record(layer="b", calls=5)],
            [],
            [record(calls=2, signal=10.0, noise=0.1), record(site="pv", operand="value")],
        ]
    )
    assert merged == [
        record(calls=3, measured=2, signal=110.0, noise=1.1),
        record(layer="b", calls=5),
        record(site="pv", operand="value"),
    ]


def test_a_record_travels_between_ranks():
    assert pickle.loads(pickle.dumps(record())) == record()
