"""Supply values that code reads from tensors without data, and operations that they lack."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def without_data() -> Iterator[None]:
    """Run the block on fake tensors."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.nn.Module, "_apply", _apply))
        stack.enter_context(patch.object(torch, "tensor", _tensor))
        stack.enter_context(patch.object(torch.distributed, "all_gather_object", _own_object))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Answers())
        yield


# Functions of megatron.core that must read 0: whether an fp16 gradient overflowed, and whether a
# group of parameters has its own gradient norm.
_ZERO = {"_unscale_main_grads_and_check_for_nan", "has_grad_norm_group"}


class _Answers(TorchDispatchMode):
    """Supply what fake tensors lack: a value that is read is 1, or 0 in the functions of _ZERO.

    The step reads values only for checks of the RNG state, of NaN and of a norm. Coalesced
    collectives end at once, because fake tensors have no rule for them. Torch's rule for grouped
    products supports only bfloat16.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            number = 0 if _reader() in _ZERO else 1
            return float(number) if args[0].dtype.is_floating_point else number
        if func.namespace == "c10d" and "coalesced" in func.overloadpacket.__name__:
            return torch._C._distributed_c10d.FakeWork().boxed()
        if func is torch.ops.aten._grouped_mm.default:
            left, right, ends = args
            groups = () if right.dim() == 3 else (ends.numel(),)
            return left.new_empty((*groups, left.shape[0], right.shape[-1]))
        return func(*args, **(kwargs or {}))


def _reader() -> str:
    """Return the function of megatron.core that reads a value."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and "/megatron/core/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_name if frame else ""


def _apply(
    module: torch.nn.Module,
    function: Callable[[Tensor], Tensor],
    recurse: bool = True,
    replaced: dict[int, tuple] | None = None,
) -> torch.nn.Module:
    """Replace each parameter by a new one with the result: fake parameters cannot be swapped.

    `replaced` has (old, new) by the id of the old parameter, so that tied ones stay tied.
    """
    replaced = {} if replaced is None else replaced
    if recurse:
        for child in module.children():
            _apply(child, function, True, replaced)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            if id(parameter) not in replaced:
                with torch.no_grad():
                    new = torch.nn.Parameter(function(parameter), parameter.requires_grad)
                new.__dict__.update(parameter.__dict__)
                replaced[id(parameter)] = (parameter, new)
            module._parameters[name] = replaced[id(parameter)][1]
    _replace_references(module, replaced)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


def _replace_references(module: torch.nn.Module, replaced: dict[int, tuple]) -> None:
    """Replace old parameters in objects of the module, such as the mixer's context parallelism."""
    for held in vars(module).values():
        if type(held).__module__.startswith("megatron."):
            for name, value in vars(held).items():
                if id(value) in replaced:
                    setattr(held, name, replaced[id(value)][1])


_real_tensor = torch.tensor


def _tensor(data: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return torch.tensor of numbers; for tensors their stack, without reading values."""
    stacked = None if isinstance(data, Tensor) else _stacked(data)
    return _real_tensor(data, *args, **kwargs) if stacked is None else stacked


def _stacked(data: Any) -> Tensor | None:
    """Return nested lists of tensors as one tensor; None if they contain anything else."""
    if isinstance(data, Tensor):
        return data
    stacked = [_stacked(item) for item in data] if isinstance(data, (list, tuple)) else []
    parts = [part for part in stacked if part is not None]
    return torch.stack(parts) if parts and len(parts) == len(stacked) else None


def _own_object(objects: list[Any], own: Any, group: Any = None) -> None:
    """Set the objects of all ranks to this rank's."""
    objects[:] = [own] * len(objects)
