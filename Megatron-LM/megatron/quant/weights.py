"""A cache of quantised weights, so that each is quantised once an optimizer step.

Neither a weight's address nor its version says that an optimizer changed it: with bf16 the new
values are copied from the optimizer's own, past autograd's sight. So the optimizers of the patched
Megatron say it themselves: `weights_changed` begins a new epoch, and what an earlier one left is
quantised anew when it is next asked for, which is after the parameters were gathered. What changes
a weight in autograd's sight, as loading a state dict does, is seen by its version.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .spec import QuantSpec

_epoch = 0


@dataclass
class _Entry:
    """A quantised weight, and what it was made of: epoch, version, seed."""

    made_of: tuple[int, int, int | None]
    quantised: Tensor


# weight -> {(spec, axis): entry}; an entry goes with its weight.
_entries: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def weights_changed() -> None:
    """Say that weights are being changed: by an optimizer's step, or by loading a checkpoint."""
    global _epoch
    _epoch += 1


def cached(
    weight: Tensor,
    spec: QuantSpec,
    axis: int,
    seed: int | None,
    quantise: Callable[[Tensor | None], Tensor],
) -> Tensor:
    """Return `weight` as quantised to `spec` along `axis` with `seed`, in this epoch.

    `quantise(out)` is called when the cache has nothing that is still right: it writes to `out`,
    the memory of the outdated copy, or to new memory if that is None. What is returned is not to be
    written to.
    """
    kept = _entries.setdefault(weight, {})
    entry = kept.get((spec, axis))
    made_of = (_epoch, weight._version, seed)
    if entry is None or entry.made_of != made_of:
        out = None if entry is None else _reusable(entry.quantised, weight)
        entry = kept[(spec, axis)] = _Entry(made_of, quantise(out))
    # Another tensor of the same memory: a graph that it becomes part of is not the cache's.
    return entry.quantised.detach()


def _reusable(old: Tensor, weight: Tensor) -> Tensor | None:
    """Return `old` if it has the weight's form still; a weight can be moved or cast."""
    same = (old.shape, old.dtype, old.device) == (weight.shape, weight.dtype, weight.device)
    return old if same else None


def cached_bytes() -> int:
    """Return how many bytes the cache holds, on all devices together."""
    return sum(e.quantised.nbytes for kept in _entries.values() for e in kept.values())


def clear() -> None:
    """Forget all copies."""
    _entries.clear()
