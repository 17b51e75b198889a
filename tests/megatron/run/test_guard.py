from argparse import Namespace

import pytest
from megatron.quant import RECORDER, Layer, merge, set_step, stochastic
from megatron.run import GuardError, after_step, before_step, guard
from torch import nn

ARGS = Namespace(curr_iteration=0)


def test_a_site_that_was_asked_for_and_never_ran_ends_the_run(run):
    run(qk="mxfp8")
    with pytest.raises(GuardError, match=r"iteration 3.*qk: asked for mxfp8.*never ran"):
        after_step(3)


def test_a_site_that_ran_as_another_type_ends_the_run(run, quantised):
    run(fprop="mxfp8")
    quantised("fprop", "mxfp4", "x", "weight")
    with pytest.raises(GuardError, match=r"fprop: asked for mxfp8.*ran as mxfp4"):
        after_step(1)


def test_a_site_that_nobody_asked_for_ends_the_run(run, quantised):
    run()
    quantised("pv", "hifp8", "probs", "value")
    with pytest.raises(GuardError, match="pv: asked for none"):
        after_step(1)


def test_every_fault_is_named(run):
    run(qk="mxfp8", dgrad="mxfp4")
    with pytest.raises(GuardError) as caught:
        after_step(1)
    assert "qk:" in str(caught.value)
    assert "dgrad:" in str(caught.value)


def test_a_run_that_quantises_as_asked_goes_on(run, quantised):
    run(fprop="mxfp8")
    quantised("fprop", "mxfp8", "x", "weight")
    after_step(1)


def test_only_the_first_step_is_checked(run, quantised):
    run()
    after_step(1)
    quantised("pv", "hifp8", "probs", "value")
    after_step(2)


def test_the_quantisers_learn_of_every_step_even_without_a_run_folder(run):
    for iteration in (1, 2):
        after_step(iteration)
        assert stochastic.step() == iteration
    set_step(0)


def test_without_a_run_folder_nothing_is_checked(run, quantised, monkeypatch):
    monkeypatch.setattr(guard, "gather", lambda: pytest.fail("a collective was started"))
    quantised("pv", "hifp8", "probs", "value")
    after_step(1)


def test_a_process_group_is_asked_for_the_records_of_all_ranks(
    run, quantised, one_rank, monkeypatch
):
    run(fprop="mxfp8", qk="mxfp4")
    quantised("fprop", "mxfp8", "x", "weight")
    real = guard.torch.distributed.all_gather_object
    ours = RECORDER.entries()
    RECORDER.reset()
    quantised("qk", "mxfp4", "query", "key")
    theirs = RECORDER.entries()

    def two_ranks(ranks, entries):
        real(ranks, entries)
        ranks.append(ours)

    monkeypatch.setattr(guard.torch.distributed, "all_gather_object", two_ranks)
    assert guard.gather() == merge([theirs, ours])
    after_step(1)


# -- before the first step ---------------------------------------------------------------------


def test_the_quantisers_learn_the_step_that_a_checkpoint_was_at(run):
    before_step([], Namespace(curr_iteration=7))
    assert stochastic.step() == 7
    set_step(0)


def test_an_exclude_that_matches_no_layer_ends_the_run_before_its_first_step(run):
    run(exclude=("proj",))
    before_step([nn.ModuleDict({"proj": nn.Linear(4, 4)})], ARGS)
    run(exclude=("pro",))
    guard._inspected = False
    with pytest.raises(GuardError, match=r"before the first step.*'pro' matches no.*nearest.*proj"):
        before_step([nn.ModuleDict({"proj": nn.Linear(4, 4)})], ARGS)


def test_the_model_is_inspected_once(run, monkeypatch):
    run(exclude=("proj",))
    model = [nn.ModuleDict({"proj": nn.Linear(4, 4)})]
    before_step(model, ARGS)
    monkeypatch.setattr(guard, "inspect", lambda layers: pytest.fail("inspected again"))
    before_step(model, ARGS)


def test_a_layer_of_another_rank_is_matched_too(run, one_rank, monkeypatch):
    run(exclude=("output_layer",))
    real = guard.torch.distributed.all_gather_object

    def two_ranks(ranks, layers):
        real(ranks, layers)
        ranks.append([Layer("output_layer", "linear", "ColumnParallelLinear", False)])

    monkeypatch.setattr(guard.torch.distributed, "all_gather_object", two_ranks)
    before_step([nn.ModuleDict({"proj": nn.Linear(4, 4)})], ARGS)


def test_without_a_run_folder_no_model_is_inspected(run, monkeypatch):
    monkeypatch.setattr(guard, "inspect", lambda layers: pytest.fail("inspected"))
    before_step([nn.ModuleDict({"proj": nn.Linear(4, 4)})], ARGS)
