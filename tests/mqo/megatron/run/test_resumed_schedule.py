"""Resuming on another schedule of learning rate and weight decay."""

from types import SimpleNamespace

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from mqo.megatron.run.checkpoints import CheckpointError
from mqo.megatron.run.resumed_schedule import KEEP, REPLACE, check_schedule

NUMBERS = {
    **{"max_lr": 1e-3, "min_lr": 1e-4, "lr_warmup_steps": 4.0, "lr_decay_steps": 32},
    **{"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 32},
}
STYLES = {"lr_decay_style": "cosine", "wd_incr_style": "constant"}
OTHER = {name: value * 2 for name, value in NUMBERS.items()}
OTHER |= {"lr_decay_style": "linear", "wd_incr_style": "linear"}
OTHER |= {"lr_warmup_steps": 6.0, "start_wd": 0.05}  # below lr_decay_steps, and end_wd


def scheduler(**changes):
    optimizer = SimpleNamespace(param_groups=[])
    values = {"init_lr": 0.0, **NUMBERS, **STYLES, "use_checkpoint_opt_param_scheduler": False}
    return OptimizerParamScheduler(optimizer, **(values | changes))


@pytest.mark.parametrize("name", OTHER)
def test_any_value_that_is_not_the_checkpoints_is_refused(name):
    saved = scheduler().state_dict()
    with pytest.raises(CheckpointError, match=f"{REPLACE}.*{KEEP}"):
        scheduler(**{name: OTHER[name]}).load_state_dict(saved)


def test_the_same_schedule_is_resumed():
    scheduler().load_state_dict(scheduler().state_dict())


@pytest.mark.parametrize("switch", [KEEP, REPLACE])
def test_a_choice_is_followed(switch):
    chosen = {KEEP: False, REPLACE: False, switch: True}
    both = {name.removeprefix("--").replace("-", "_"): value for name, value in chosen.items()}
    check_schedule(SimpleNamespace(**both), 64, 32, "length")
