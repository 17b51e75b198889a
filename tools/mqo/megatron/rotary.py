"""Scale rotary positions as Llama 3 does in models that upstream builds without the scaling."""

import functools
from collections.abc import Callable
from typing import Any

# The factor that a program sets on the configuration of a model.
FACTOR = "rope_scaling_factor"


def scaled(rotary: Callable[..., Any], config: Any) -> Callable[..., Any]:
    """Return upstream's class of rotary positions, with the scaling in `config`."""
    factor = getattr(config, FACTOR, None)
    if factor is None:
        return rotary
    return functools.partial(rotary, rope_scaling=True, rope_scaling_factor=factor)
