"""How a run ends whose loss or gradients are not finite."""

import json
import math
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from mqo.megatron.run import divergence
from mqo.megatron.run.checkpoints import TRACKER
from mqo.megatron.run.divergence import DivergenceError, check_finite_loss, end_if_diverged
from mqo.megatron.run.files import RunFiles
from mqo.megatron.run.record import recorded
from mqo.quant.finite import FiniteError
from mqo.quant.progress import set_step


@pytest.fixture(autouse=True)
def third_step():
    set_step(2)
    yield
    divergence.begin_step(Namespace(save=None))


def machine(value=None, *, message="NaN in the loss", reproduced=True):
    """Upstream's rerun state machine, behind a step that it ran twice if `value` was rejected."""
    call = SimpleNamespace(caller=SimpleNamespace(message=message)) if value is not None else None
    outcome = (False, False, 0) if value is None else (reproduced, True, 16 if reproduced else 17)
    return SimpleNamespace(
        failed_validation_call=call,
        initial_result=None if value is None else torch.tensor(value),
        should_checkpoint_and_exit=lambda: outcome,
    )


def write_metrics(folder, steps):
    rows = [
        {"iteration": at, "name": name, "value": value}
        for at, (loss, norm) in enumerate(steps, 1)
        for name, value in (("lm loss", loss), ("grad-norm", norm), ("batch-size", 8.0))
    ]
    RunFiles(folder).metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


# -- whether a step ends the run ---------------------------------------------------------------


def test_a_finite_step_goes_on(run):
    run()
    assert end_if_diverged(machine()) == (False, False, 0)
    check_finite_loss(1e30)


def test_the_step_and_the_last_finite_ones_are_named(run):
    folder = run(fprop="mxfp8")
    write_metrics(folder, [(8.0, 0.5), (7.5, 0.25)])
    with pytest.raises(DivergenceError) as error:
        end_if_diverged(machine(math.nan))
    text = str(error.value)
    assert text == (
        "NaN in the loss of rank 0 in step 3, which was run again with the same result. The "
        "last finite steps on record are step 1: loss 8.0000, gradient norm 0.5; step 2: loss "
        "7.5000, gradient norm 0.25. No checkpoint was saved. A run with --check-nan names the "
        "first layer. Try a lower --lr, a longer warm-up (--lr-warmup-fraction), --exclude for "
        "the layer or another quantization type."
    )


def test_a_gradient_and_an_outcome_that_differs_are_told_apart(run):
    run()
    message = "found Inf in local grad norm for bucket #0"
    with pytest.raises(DivergenceError, match=r"Inf .*gradient norm .*rank 0.*hardware"):
        end_if_diverged(machine(math.inf, message=message, reproduced=False))


def test_every_rank_ends_where_another_one_saw_it(run, monkeypatch):
    run()
    there = divergence.Rejected(5, "loss", math.nan)
    monkeypatch.setattr(divergence, "all_ranks", lambda here: [here, there, there])
    ends = machine(math.nan)
    ends.failed_validation_call = None
    with pytest.raises(DivergenceError, match=r"NaN .*loss .*rank 5 .*1 .*step 3"):
        end_if_diverged(ends)


def test_a_validation_loss_ends_the_run_where_it_is(run):
    run()
    with pytest.raises(DivergenceError, match=r"Inf .*loss .*rank 0 .*step 2"):
        check_finite_loss(-math.inf)


def test_of_an_unquantized_run_no_quantizer_is_suspected(run):
    run(fprop="none")
    with pytest.raises(DivergenceError) as error:
        end_if_diverged(machine(math.nan))
    assert "--exclude" not in str(error.value)
    assert "--lr" in str(error.value)


def test_the_newest_checkpoint_is_named(run, tmp_path):
    run()
    (tmp_path / TRACKER).write_text("2")
    divergence.begin_step(Namespace(save=str(tmp_path)))
    with pytest.raises(DivergenceError, match=f"step 2 in {tmp_path}"):
        end_if_diverged(machine(math.nan))


# -- what is known of the steps before ---------------------------------------------------------


def test_steps_that_are_not_finite_or_not_whole_do_not_count(run):
    folder = run()
    write_metrics(folder, [(8.0, 0.5), (7.5, "inf"), ("nan", 0.5), (7.0, 0.1)])
    with RunFiles(folder).metrics.open("a") as lines:
        lines.write('{"iteration": 5, "name": "lm loss", "value": 3.0}\n{"iteration": 6, "na')
    assert divergence.finite_steps(RunFiles(folder).metrics) == [(1, 8.0, 0.5), (4, 7.0, 0.1)]


def test_of_a_long_run_the_end_is_read(run, monkeypatch):
    folder = run()
    write_metrics(folder, [(8.0 - at / 8, 0.5) for at in range(40)])
    monkeypatch.setattr(divergence, "_TAIL", 1000)
    assert [at for at, _, _ in divergence.finite_steps(RunFiles(folder).metrics)] == [38, 39, 40]


def test_without_metrics_there_is_no_step_to_name(tmp_path):
    assert divergence.finite_steps(RunFiles(tmp_path).metrics) == []


# -- where the layer is known ------------------------------------------------------------------


def test_a_layer_that_was_found_is_named_with_the_steps_before(run):
    folder = run(fprop="mxfp8")
    write_metrics(folder, [(8.0, 0.5)])
    with pytest.raises(DivergenceError) as error, recorded(None):
        raise FiniteError("NaN in the output of layers.7, in iteration 3")
    text = str(error.value)
    assert text.startswith("NaN in the output of layers.7, in iteration 3. ")
    assert "step 1: loss 8.0000" in text
    assert "--check-nan" not in text
    assert RunFiles(folder).failure.read_text() == f"DivergenceError: {text}\n"


# -- on upstream's own machine -----------------------------------------------------------------


@pytest.fixture
def upstream(vendored, one_rank, run):
    """Upstream's machine as training sets it up, in the first step of a process."""
    rerun = pytest.importorskip("megatron.core.rerun_state_machine")
    run()
    rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.VALIDATE_RESULTS)
    machine = rerun.get_rerun_state_machine()
    machine.current_iteration = 0
    yield machine
    rerun.destroy_rerun_state_machine()


@pytest.mark.parametrize(("first", "name"), [(math.nan, "NaN"), (math.inf, "Inf"), (1.0, "")])
def test_a_first_step_is_looked_at_and_run_again(upstream, first, name):
    losses = []
    while upstream.should_run_forward_backward(None):
        losses.append(torch.tensor(first))
        for rejected in (torch.isnan, torch.isinf):
            upstream.validate_result(losses[-1], rejected, f"{rejected} in the loss")
    if math.isfinite(first):
        assert end_if_diverged(upstream) == (False, False, 0)
        assert len(losses) == 1
        return
    with pytest.raises(DivergenceError, match=f"{name} .*loss.*the same result"):
        end_if_diverged(upstream)
    assert len(losses) == 2
