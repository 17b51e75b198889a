"""The factor of the rotary scaling: in a look-alike of our own of the function that dropped it."""

from types import SimpleNamespace

from .conftest import sites

SOURCE = """
def gpt_config_from_args(args, model_config_cls=dict):
    kwargs = {"rope_scaling": args.use_rope_scaling}
    return model_config_cls(**kwargs)


def other_config_from_args(args, model_config_cls=dict):
    kwargs = {}
    return model_config_cls(**kwargs)
"""


def test_the_configuration_has_what_the_arguments_say():
    scope = {}
    exec(sites("rope_scaling_factor", "megatron/training/argument_utils.py", SOURCE), scope)
    args = SimpleNamespace(use_rope_scaling=True, rope_scaling_factor=32.0)
    found = scope["gpt_config_from_args"](args)
    assert found == {"rope_scaling": True, "rope_scaling_factor": 32.0}
    assert scope["other_config_from_args"](args) == {}
