"""Protect against the extra state of Transformer Engine's modules in checkpoints.

The state is a pickle of a quantization recipe and its scales. Transformer Engine loads it without
restricting the classes that it names. Our factory needs no state: scales are computed from
the current tensor, and types are in the source.
"""

import io
from argparse import Namespace
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module

from mqo.megatron import linear
from mqo.megatron.run.unpickle import CheckpointError, ForeignError, Reader, check_pickle
from mqo.megatron.transformer_engine.releases import FACTORY

_RECIPES = "transformer_engine.common.recipe"
_KEPT = "mqo_states_are_checked"


class StateReader(Reader):
    """Unpickle recipes and tensors, and nothing else."""

    known: ClassVar = {
        "collections": {"OrderedDict"},
        "torch._utils": {"_rebuild_tensor_v2"},
        # torch's obeys the process's restriction to weights; Megatron's has its own.
        "torch.storage": {"_load_from_bytes"},
        "megatron.core.safe_globals": {"safe_load_from_bytes"},
        _RECIPES: set(),
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of Transformer Engine's recipes, or one that all readers allow."""
        if module == _RECIPES and name.isidentifier():
            cls = super(Reader, self).find_class(module, name)
            if isinstance(cls, type) and cls.__module__ == _RECIPES:
                return cls
            raise ForeignError(f"{module}.{name}")
        return super().find_class(module, name)


def protect_states(model: Module, args: Namespace) -> None:
    """Make the engine's modules in `model` load checkpoints without running code.

    If `args` select our factory, the modules neither load nor save state.
    """
    ours = getattr(args, "fp8_quantizer_factory", None) == FACTORY
    module: Any
    for module in model.modules():
        if linear.asks_for_quantizers(module) and not hasattr(module, _KEPT):
            setattr(module, _KEPT, True)
            if ours:
                module.get_extra_state = _nothing
                module.set_extra_state = _ignore
            else:
                module.set_extra_state = _checked(module.set_extra_state)


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _ignore(state: object) -> None:
    del state


def _checked(load: Callable[[Any], None]) -> Callable[[Any], None]:
    def set_extra_state(state: Any) -> None:
        if isinstance(state, Tensor):
            if state.numel():
                content = state.detach().cpu().numpy().tobytes()
                check_pickle(StateReader(io.BytesIO(content)), "The state of a quantizer")
        elif state is not None:
            raise CheckpointError(
                "The state of a quantizer is in a form that Transformer Engine no longer writes. "
                "Expected: a tensor of bytes. Give a checkpoint from a newer release"
            )
        load(state)

    return set_extra_state
