"""Which ranks and steps are simulated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqo.launch.config import Cluster, resolve
from mqo.launch.machine import Machine
from mqo.simulate.jobs import RunJob, steps


@given(st.integers(1, 300), st.integers(1, 16), st.booleans(), st.booleans())
def test_steps_never_have_more_micro_batches_than_the_run(
    micro_batches, stages, interleaved, distills
):
    micro_batches *= stages if interleaved else 1
    found = steps(micro_batches, stages, interleaved, distills)
    if distills:  # one micro-batch has one pass, several may have two
        assert min(found) > 1 or micro_batches == 1
    assert len(found) > 1  # the first one has no optimizer states yet
    assert max(found) <= micro_batches
    if interleaved:
        assert not any(n % stages for n in found)
    # What is left out is a multiple of the last difference, and all stages were full.
    further = micro_batches - found[-1]
    if further:
        assert further % (found[-1] - found[-2]) == 0
        assert found[-2] >= stages


def job(*flags, gpus=64, **rest):
    cluster = Cluster(nnodes=gpus // 8, nproc_per_node=8)
    made = resolve(
        "llama32-1b", "wikipedia", "mxfp8", "standard", extra_flags=flags, cluster=cluster, **rest
    )
    return RunJob.from_config(made, Machine(1, 8), dict(made.quantization.types), 1.0)


def told(*flags, **rest):
    return list(job(*flags, **rest).requests())


def test_one_stage_is_its_first_rank():
    (only,) = told()
    assert (only["rank"], only["world"], only["per_node"]) == (0, 64, 8)
    assert only["micro_batches"] == [1, 2]  # 128 sequences on 64 ranks


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--pipeline-model-parallel-size 2", [0, 32]),
        ("--pipeline-model-parallel-size 8", [0, 8, 56]),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2",
            [0, 16, 32, 48],
        ),
    ],
)
def test_of_equal_stages_the_one_with_most_in_flight_is_taken(flags, ranks):
    assert [one["rank"] for one in told(*flags.split())] == ranks


@pytest.mark.parametrize(
    ("pattern", "ranks"),
    [
        ("*-" * 16, [0, 8, 56]),
        ("|".join(["*-", "*-", "*--", "*-", "*--", "*-", "*-", "*-"]), [0, 8, 16, 56]),
    ],
)
def test_stages_of_a_pattern_are_equal_if_they_have_the_same_layers(pattern, ranks):
    flags = ("--hybrid-layer-pattern", pattern, "--pipeline-model-parallel-size", "8")
    assert [one["rank"] for one in told(*flags)] == ranks


def test_several_segments_of_a_pattern_per_stage_take_whole_rounds():
    flags = ("--hybrid-layer-pattern", "|".join(["*-"] * 8), "--pipeline-model-parallel-size", "4")
    assert told(*flags)[0]["micro_batches"] == [4, 8]


def test_interleaved_stages_take_whole_rounds():
    flags = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2"
    assert told(*flags.split())[0]["micro_batches"] == [4, 8]


def test_the_run_is_not_measured():
    options = job(every=7).options
    assert "every = 0" in options
