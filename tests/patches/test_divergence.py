"""A step that is not finite ends the run, the first one too."""

import pytest

from .conftest import executed


def test_what_a_step_ends_with_is_asked_of_our_hook(module):
    asked = []
    module("mqo.megatron.hooks", end_if_diverged=lambda machine: asked.append(machine) or (0, 1, 2))
    source = """\
        import time

        def train_step():
            rerun_state_machine = "machine"
            first, second, third = rerun_state_machine.should_checkpoint_and_exit()
            return third
        """
    scope = executed("divergence", "megatron/training/training.py", source)
    assert scope["train_step"]() == 2
    assert asked == ["machine"]


@pytest.mark.parametrize("complete", [True, False])
def test_a_first_step_is_no_exception(complete):
    source = """\
        class RerunStateMachine:
            def validate_result(self):
                if not self.first_iteration_complete:
                    return "not looked at"
                return "looked at"
        """
    scope = executed("divergence", "megatron/core/rerun_state_machine.py", source)
    machine = scope["RerunStateMachine"]()
    machine.first_iteration_complete = complete
    assert machine.validate_result() == "looked at"
