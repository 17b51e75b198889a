"""A cache of quantized weights: each weight is quantized once per optimizer step.

A cached copy is valid until one of these events:

- An optimizer step. It may change neither the weight's address nor its version: Megatron's
  optimizers copy new values without autograd, and torch's fused optimizers do not increment the
  version. A step therefore starts a new epoch. Megatron's patched optimizers call
  `weights_changed`, and a hook does so for torch.optim. A new copy is made when a GEMM next reads
  the weight. Megatron has then gathered the parameter, also if gathering overlaps with the forward
  pass.
- An operation that autograd tracks, such as loading a state dict. It changes the version.
- New memory for the weight (`weight.data = new`). It changes the storage and the address. Both are
  compared, because freed memory may be allocated again at the same address.

Code that writes to `weight.data` in another way must call `weights_changed`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from mqo.quant.rounded import Rounded
from mqo.quant.spec import OperandSpec

_epoch = 0


# weight -> {(operand_spec, axis): (its state, the quantized weight)}; removed with the weight.
_entries: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def weights_changed() -> None:
    """Invalidate all copies: an optimizer step or a loaded checkpoint changes the weights.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 4))
        >>> quantization = quantize_model(model, "mxfp8", cache_weights=True)
        >>> with torch.no_grad():
        ...     _ = model[0].weight.mul_(2)
        >>> weights_changed()
    """
    global _epoch
    _epoch += 1


def epoch() -> int:
    """Return the number of optimizer steps, and of other calls of `weights_changed`."""
    return _epoch


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Start an epoch after a step of any torch.optim.Optimizer in this process."""
    weights_changed()


register_optimizer_step_post_hook(_after_step)


def cached(
    weight: Tensor,
    operand_spec: OperandSpec,
    axis: int,
    seeds: tuple[int | None, ...],
    quantize: Callable[[Tensor | None], Rounded],
) -> Rounded:
    """Return the current `weight` quantized by `operand_spec` along `axis`.

    `seeds` are those of stochastic rounding and of the Hadamard transform's signs.

    If the quantized values do not depend on the axis, all axes share one copy.

    If no copy is valid, `quantize(out)` makes one. It writes to `out`, the memory of the outdated
    copy, or to new memory if `out` is None. Do not write to the returned tensors.
    """
    kept = _entries.setdefault(weight, {})
    key = (operand_spec, None if operand_spec.is_same_along_all_axes else axis)
    # The weak reference to a storage equals no other storage's.
    storage = StorageWeakRef(weight.untyped_storage())
    state = (_epoch, weight._version, storage, weight.data_ptr(), seeds)
    known, rounded = kept.get(key, (None, None))
    if known != state:
        rounded = quantize(_reusable(rounded.tensor, weight) if rounded else None)
        kept[key] = state, rounded
    # New tensors with the same memory: the cached ones must not become part of a graph.
    result: Rounded = rounded.map(Tensor.detach)
    return result


def _reusable(old: Tensor, weight: Tensor) -> Tensor | None:
    """Return `old` if its shape, dtype and device are still those of the weight."""
    same = (old.shape, old.dtype, old.device) == (weight.shape, weight.dtype, weight.device)
    return old if same else None


def clear() -> None:
    """Remove all copies."""
    _entries.clear()
