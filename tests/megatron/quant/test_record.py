"""Counting and measuring: when, how well, and over several ranks."""

import math
import pickle

import pytest
import torch
from megatron.quant import RECORDER, QuantRecord, Recorder, gemm_operands, merge


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def record(site="fprop", layer="a", operand="x", kind="mxfp8", **numbers):
    numbers = {"calls": 1, "measured": 1, "signal": 100.0, "noise": 1.0, **numbers}
    return QuantRecord(site, layer, operand, kind, **numbers)


def observe(recorder, original, quantised, layer="a"):
    recorder.observe("fprop", layer, "x", "mxfp8", original, quantised)


def test_every_quantised_operand_is_counted_by_site_layer_operand_and_type():
    for kind, calls in (("mxfp8", 3), ("hifp8", 1)):
        for _ in range(calls):
            q = gemm_operands("qk", kind, None)
            q.lhs(normal(4, 2, 32))
            q.rhs(normal(4, 2, 32))
    assert [(*entry.key, entry.calls) for entry in RECORDER.entries()] == [
        ("qk", "unlabelled", "key", "hifp8", 1),
        ("qk", "unlabelled", "key", "mxfp8", 3),
        ("qk", "unlabelled", "query", "hifp8", 1),
        ("qk", "unlabelled", "query", "mxfp8", 3),
    ]


@pytest.mark.parametrize(
    ("every", "calls", "measured"),
    [(1, 4, 4), (3, 1, 1), (3, 3, 1), (3, 4, 2), (3, 7, 3), (0, 5, 0)],
)
def test_the_first_call_is_measured_and_then_one_in_so_many(options, every, calls, measured):
    options(f"[record]\nsqnr_every = {every}\n")
    recorder = Recorder()
    for _ in range(calls):
        observe(recorder, torch.ones(4), torch.zeros(4))
    (entry,) = recorder.entries()
    assert (entry.calls, entry.measured) == (calls, measured)
    assert (entry.signal, entry.noise) == (4.0 * measured, 4.0 * measured)


def test_by_default_one_call_in_fifty_is_measured():
    recorder = Recorder()
    for _ in range(51):
        observe(recorder, torch.ones(1), torch.ones(1))
    assert recorder.entries()[0].measured == 2


def test_keys_are_measured_independently(options):
    options("[record]\nsqnr_every = 2\n")
    recorder = Recorder()
    for layer in ("a", "b", "a", "a"):
        observe(recorder, torch.ones(1), torch.ones(1), layer)
    assert [(entry.layer, entry.measured) for entry in recorder.entries()] == [("a", 2), ("b", 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sqnr_is_the_ratio_of_the_energies_of_all_measured_calls(options, dtype):
    options("[record]\nsqnr_every = 1\n")
    recorder = Recorder()
    pairs = []
    for size, seed in ((3.0, 1), (0.01, 2)):
        x = (size * normal(64, 64, seed=seed)).to(dtype)
        pairs.append((x, (x.float() + 0.01 * size * normal(64, 64, seed=9)).to(dtype)))
        observe(recorder, *pairs[-1])
    signal = sum(x.double().square().sum().item() for x, _ in pairs)
    noise = sum((x.double() - q.double()).square().sum().item() for x, q in pairs)
    (entry,) = recorder.entries()
    # The recorder subtracts in float32 (2^-24 relative to x, 1e-5 to an error of 1 %) and takes a
    # square of a root in float64.
    assert entry.signal == pytest.approx(signal, rel=1e-12)
    assert entry.noise == pytest.approx(noise, rel=1e-5)
    assert entry.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-4)


def test_energies_beyond_float32_do_not_overflow():
    recorder = Recorder()
    observe(recorder, torch.full((8,), 1e30), torch.full((8,), 0.9e30))
    assert recorder.entries()[0].sqnr_db == pytest.approx(20.0, abs=1e-4)


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
    observe(recorder, torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]))
    assert math.isnan(recorder.entries()[0].sqnr_db)


def test_measuring_records_no_gradient():
    x = normal(4, 32).requires_grad_()
    gemm_operands("fprop", "mxfp8", None).lhs(x)
    RECORDER.observe("fprop", "a", "x", "mxfp8", x, 2 * x)
    assert all(isinstance(entry.signal, float) for entry in RECORDER.entries())
    assert not any(tally.energies.requires_grad for tally in RECORDER._tallies.values())


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


def test_merging_is_as_good_as_one_recorder(options):
    options("[record]\nsqnr_every = 1\n")
    ranks, whole = [Recorder(), Recorder()], Recorder()
    for seed in range(6):
        x = normal(16, seed=seed)
        for recorder in (ranks[seed % 2], whole):
            observe(recorder, x, x.round())
    (merged,), (expected,) = merge(rank.entries() for rank in ranks), whole.entries()
    assert (merged.calls, merged.measured) == (expected.calls, expected.measured)
    # Only the order of a float64 sum differs.
    assert merged.sqnr_db == pytest.approx(expected.sqnr_db, abs=1e-9)


def test_a_record_travels_between_ranks():
    assert pickle.loads(pickle.dumps(record())) == record()
