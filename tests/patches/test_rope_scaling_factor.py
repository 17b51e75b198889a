"""The factor of the rotary scaling: in a look-alike of our own of the function that dropped it."""

from types import SimpleNamespace

from .conftest import executed

SOURCE = """
def gpt_config_from_args(args, model_config_cls=dict):
    kwargs = {"rope_scaling": args.use_rope_scaling}
    return model_config_cls(**kwargs)


def other_config_from_args(args, model_config_cls=dict):
    kwargs = {}
    return model_config_cls(**kwargs)
"""


def test_the_configuration_has_what_the_arguments_say():
    path = "megatron/training/argument_utils.py"
    scope = executed("rope_scaling_factor", path, SOURCE)
    args = SimpleNamespace(use_rope_scaling=True, rope_scaling_factor=32.0)
    found = scope["gpt_config_from_args"](args)
    assert found == {"rope_scaling": True, "rope_scaling_factor": 32.0}
    assert scope["other_config_from_args"](args) == {}
