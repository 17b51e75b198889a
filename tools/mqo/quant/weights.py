"""A cache of quantized weights, so that each is quantized once an optimizer step.

A copy is right as long as nothing that can change its weight has happened since it was made:

- An optimizer's step. Neither a weight's address nor its version shows one: Megatron's optimizers
  copy new values past autograd's sight, and torch's fused ones do not count a version. So a step
  begins a new epoch: the patched optimizers of Megatron call `weights_changed`, and those of
  torch.optim do by a hook. A copy is made when its weight is next asked for. That is in the next
  forward pass, after the parameters were gathered, however long that goes on behind the step.
- A change that autograd sees, such as loading a state dict: the weight's version.
- Other memory in the place of the weight's (`weight.data = new`): its storage and address. The
  storage counts for itself, since memory that was freed may come back at the same address.

Whatever writes to `weight.data` by other means has to call `weights_changed`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from mqo.quant.spec import OperandSpec

_epoch = 0


@dataclass(frozen=True)
class _State:
    """What a copy was made of. As long as `storage` is kept, no other storage is equal to it."""

    epoch: int
    version: int
    storage: StorageWeakRef
    address: int
    seeds: tuple[int | None, ...]


@dataclass(frozen=True)
class _Entry:
    """A quantized weight, the amax of its scale, and what it was made of."""

    made_of: _State
    quantized: Tensor
    amax: Tensor | None


# weight -> {(how, axis): entry}; an entry goes with its weight.
_entries: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def weights_changed() -> None:
    """Say that weights are being changed: by an optimizer's step, or by loading a checkpoint."""
    global _epoch
    _epoch += 1


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Begin an epoch after the step of any torch.optim.Optimizer of this process."""
    weights_changed()


register_optimizer_step_post_hook(_after_step)


def cached(
    weight: Tensor,
    how: OperandSpec,
    axis: int,
    seeds: tuple[int | None, ...],
    quantize: Callable[[Tensor | None], tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor | None]:
    """Return `weight` as quantized by `how` along `axis`, as it is now, and its amax.

    `seeds` are those that were drawn with: of the rounding, and of a transform's signs.

    A weight that has the same values along all axes has one copy for all.

    `quantize(out)` is called when the cache has nothing that is still right: it writes to `out`,
    the memory of the outdated copy, or to new memory if that is None. The amax is what it used, if
    any. What is returned is not to be written to.
    """
    kept = _entries.setdefault(weight, {})
    place = (how, None if how.is_same_along_all_axes else axis)
    entry = kept.get(place)
    storage = StorageWeakRef(weight.untyped_storage())
    made_of = _State(_epoch, weight._version, storage, weight.data_ptr(), seeds)
    if entry is None or entry.made_of != made_of:
        out = None if entry is None else _reusable(entry.quantized, weight)
        entry = kept[place] = _Entry(made_of, *quantize(out))
    # Another tensor of the same memory: a graph that it becomes part of is not the cache's.
    return entry.quantized.detach(), entry.amax


def _reusable(old: Tensor, weight: Tensor) -> Tensor | None:
    """Return `old` if it has the weight's form still; a weight can be moved or cast."""
    same = (old.shape, old.dtype, old.device) == (weight.shape, weight.dtype, weight.device)
    return old if same else None


def cached_bytes() -> int:
    """Return how many bytes the cache holds, on all devices together."""
    return sum(e.quantized.nbytes for kept in _entries.values() for e in kept.values())


def clear() -> None:
    """Forget all copies."""
    _entries.clear()
