"""Counts of a step, and the least time they take, by hand."""

import pytest
from mqo.megatron.simulation.rows import Exchange, Work
from mqo.scale.devices import DEVICES, device
from mqo.simulate.facts import RankFacts
from mqo.simulate.roofline import Roofline, parallelism

H100 = device("h100-80gb")
PRODUCT = {
    "layer": "a",
    "gemm": "fprop",
    "quant_type": "mxfp8",
    "shape": (1, 4, 5, 6),
    "flops": 10**13,
    "size": 10**6,
    "masked": 0.0,
}
COPY = PRODUCT | {"gemm": "copy_", "quant_type": None, "shape": (), "flops": 0, "size": 10**10}
SENT = {
    "operation": "broadcast",
    "group": "TENSOR_MODEL_PARALLEL_GROUP",
    "ranks": 2,
    "nodes": 1,
    "size": 10**9,
}


def facts(*steps, global_batch=8, **rest):
    places = {"rank": 0, "world": 1, "stage": 0, "stages": 1, "chunks": 1, "parameters": 1}
    sizes = {"micro_batch": 1, "sequence": 8, "data": 1, "global_batch": global_batch}
    memory = {"setup_peak": 1, "step_peaks": [3, 3], "peak": 3, "kinds": {"weights": 3}}
    empty = {"at_peak": [], "timeline": {}}
    return RankFacts(**places | sizes | memory | empty | rest, steps=list(steps))


def step(micro_batches, works=(), exchanges=()):
    return {
        "micro_batches": micro_batches,
        "works": [row | {"calls": calls} for row, calls in works],
        "exchanges": [row | {"calls": calls} for row, calls in exchanges],
    }


def test_further_micro_batches_add_what_the_last_one_did():
    found = facts(step(1, [(PRODUCT, 5), (COPY, 1)]), step(2, [(PRODUCT, 8), (COPY, 1)]))
    assert found.micro_batches == 8
    assert found.works() == {Work(**PRODUCT): 8 + 6 * 3, Work(**COPY): 1}


def test_a_step_of_few_micro_batches_is_as_it_was_simulated():
    found = facts(step(1, [(PRODUCT, 5)]), step(2, [(PRODUCT, 8)]), global_batch=2)
    assert found.works() == {Work(**PRODUCT): 8}
    found = facts(step(1, [], [(SENT, 2)]), step(1, [], [(SENT, 2)]), global_batch=1)
    assert found.exchanges() == {Exchange(**SENT): 2}


@pytest.mark.parametrize(("peaks", "steady"), [([1, 100, 100], True), ([1, 100, 150], False)])
def test_a_peak_that_grows_with_micro_batches_is_not_steady(peaks, steady):
    assert facts(step(1), step(2), step_peaks=peaks).is_steady is steady
    assert facts(step(1), step(2), step_peaks=peaks, global_batch=2).is_steady


def roofline(found):
    return Roofline.for_rank(found, H100)


def test_a_product_takes_the_longer_of_its_two_times():
    one = facts(step(1, [(PRODUCT, 1)]), global_batch=1)
    assert roofline(one).products.seconds == pytest.approx(1e13 / 989.4e12)
    wide = facts(step(1, [(PRODUCT | {"size": 10**12}, 1)]), global_batch=1)
    assert roofline(wide).products.seconds == pytest.approx(1e12 / 3350e9)
    half = facts(step(1, [(PRODUCT | {"masked": 0.5}, 2)]), global_batch=1)
    assert roofline(half).products.seconds == pytest.approx(1e13 / 989.4e12)
    assert roofline(half).products.flops == 2e13


@pytest.mark.parametrize(
    ("ranks", "nodes", "rate"),
    [(8, 1, 450e9), (16, 16, 50e9), (16, 8, 100e9), (64, 4, 450e9)],
)
def test_an_exchange_between_nodes_has_the_adapters_of_its_gpus(ranks, nodes, rate):
    sent = SENT | {"ranks": ranks, "nodes": nodes}
    found = roofline(facts(step(1, [], [(sent, 3)]), global_batch=1))
    (part,) = found.exchanges.values()
    assert part.seconds == pytest.approx(3 * 1e9 / rate)
    assert found.bound == "communication"


def test_stages_wait_for_one_another():
    found = roofline(facts(step(1, [(COPY, 4)]), stages=4, chunks=2, global_batch=6))
    busy = found.computing
    assert found.bubble == 3 / 12
    assert found.overlapped == pytest.approx(1.25 * busy)
    assert found.bound.startswith("memory bandwidth")


def test_nothing_hidden_takes_the_sum_and_all_hidden_the_longer():
    found = roofline(facts(step(1, [(COPY, 4)], [(SENT, 4)]), global_batch=1))
    assert found.serial == pytest.approx(found.computing + found.exchanging)
    assert found.overlapped == pytest.approx(max(found.computing, found.exchanging))


@pytest.mark.parametrize(
    ("group", "kind"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "TP"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "DP"),
        ("EXPERT_DATA_PARALLEL_GROUP", "expert DP"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "EP"),
        ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", "EP"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "PP"),
        ("CONTEXT_PARALLEL_GROUP", "CP"),
        ("EMBEDDING_GROUP", "PP"),
        ("default_pg", "all ranks"),
    ],
)
def test_groups_are_known_by_upstreams_descriptions(group, kind):
    assert parallelism(group) == kind


def test_every_device_says_where_its_figures_are_from():
    assert len(DEVICES) > 3
    for one in DEVICES.values():
        assert len(one.source) > 20
        assert (
            min(one.memory_gib, one.bf16_tflops, one.memory_gbs, one.link_gbs, one.network_gbs) > 0
        )
