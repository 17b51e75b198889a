"""Log the lifetime of every storage, and report what was alive at each operation."""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from mqo.megatron.simulation.rows import KINDS
from mqo.megatron.simulation.watch import Call, Origin
from mqo.quant.packing import working_dtype

ALIGNMENT = 512  # bytes; torch's allocator for CUDA rounds sizes up to multiples of this
# The layer and the files whose tensors are logits or belong to the loss.
_HEAD, _LOSSES = "output_layer", "mqo/megatron/losses/"
# {operation: function from the operation's arguments to the bytes that its kernel allocates besides
# the results}. torch's flash attention accumulates the gradient of queries in fp32.
WORKSPACE = {
    "pack": lambda args: _copies(args[0], args[4]),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda args: 4 * args[1].numel(),
}


def _copies(x: Tensor, quant_type: str) -> int:
    """Return the bytes of the rounded copy in packing, and of the wider copy before it."""
    dtype = working_dtype(x, quant_type)
    return x.numel() * dtype.itemsize * (1 + (dtype != x.dtype))


@dataclass(slots=True)
class Allocation:
    """The lifetime of a storage of `size` bytes.

    It exists after the operation `born`, and no longer after the operation `died`; both are
    numbers of operations. `phase` is "setup", "forward", "backward" or "optimizer". `set_kind` sets
    the kind of storages that outlive a step.
    """

    size: int
    born: int
    origin: Origin
    phase: str
    died: int | None = None
    kind: str | None = None


@dataclass
class AllocationLog:
    """An observer that logs storages. `only_fake` counts only tensors without data."""

    only_fake: bool = True
    phase: str = "setup"
    log: list[Allocation] = field(default_factory=list)
    _alive: dict[int, list] = field(default_factory=dict)
    _backward: list[int] = field(default_factory=list)
    _clock: int = 0

    def __call__(self, call: Call) -> None:
        """Log the storages of an operation's results."""
        self._clock = call.clock
        phase = self.phase
        if call.backward:
            phase = "backward"
            if not call.recomputed:
                self._backward.append(call.clock)
        for tensor in tensors(call.result):
            self._note(tensor, call.origin, phase)
        workspace = WORKSPACE.get(call.func.overloadpacket.__name__ if call.func else "")
        if workspace:
            self.log.append(
                Allocation(workspace(call.args), call.clock, call.origin, phase, call.clock + 1)
            )

    def _note(self, tensor: Tensor, origin: Origin, phase: str) -> None:
        if self.only_fake and not isinstance(tensor, FakeTensor):
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            allocation = self._log(storage, origin, phase)
            self._alive[key] = [weakref.ref(storage, lambda _: self._end(key)), allocation]

    def _log(self, storage: torch.UntypedStorage, origin: Origin, phase: str) -> Allocation:
        size = -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        allocation = Allocation(size, self._clock, origin, phase)
        self.log.append(allocation)
        return allocation

    def _end(self, key: int) -> None:
        _, allocation = self._alive.pop(key)
        allocation.died = self._clock + 1  # it still existed after the last operation

    @contextmanager
    def watching_sizes(self) -> Iterator[None]:
        """Log the storages of activations that upstream frees, and recomputes for backward."""
        real = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            done = real(storage, size)
            if entry := self._alive.get(storage._cdata):  # its earlier bytes are freed
                old = entry[1]
                old.died = self._clock + 1
                entry[1] = self._log(storage, old.origin, old.phase)
            return done

        with patch.object(torch.UntypedStorage, "resize_", resize_):
            yield

    def set_kind(self, kind: str, owned: Iterable[Tensor]) -> None:
        """Set the kind of tensors that outlive a step."""
        for tensor in owned:
            entry = self._alive.get(tensor.untyped_storage()._cdata)
            if entry and entry[1].kind is None:
                entry[1].kind = kind

    def between(self, start: int, end: int) -> "Window":
        """Return the storages that were alive between two clocks, each with its kind."""
        backward = np.asarray(self._backward, dtype=np.int64)
        rows = []
        for allocation in self.log:
            died = end + 1 if allocation.died is None else allocation.died
            if allocation.size and died > start and allocation.born <= end:
                rows.append(
                    (
                        max(allocation.born, start),
                        died,
                        allocation.size,
                        _kind(allocation, died, backward),
                        allocation,
                    )
                )
        return Window(start, end, rows)


def _kind(allocation: Allocation, died: int, backward: np.ndarray) -> str:
    """Return the kind; an activation is made in a forward pass and alive in the next backward."""
    if allocation.kind:
        return allocation.kind
    if allocation.origin.quantizes:
        return "quantizer"
    if allocation.origin.layer.rpartition(".")[2] == _HEAD or _LOSSES in allocation.origin.line:
        return "logits"
    if allocation.phase == "forward":
        after = np.searchsorted(backward, allocation.born, side="right")
        if after < len(backward) and backward[after] < died:
            return "activations"
    return "temporary"


@dataclass(frozen=True)
class Window:
    """Rows (born, died, bytes, kind, allocation) of storages alive between two clocks."""

    start: int
    end: int
    rows: list[tuple[int, int, int, str, Allocation]]

    def curves(self) -> np.ndarray:
        """Return the bytes alive after each operation, [kinds, end - start + 1]."""
        steps = np.zeros((len(KINDS), self.end - self.start + 2), dtype=np.int64)
        for born, died, size, kind, _ in self.rows:
            row = KINDS.index(kind)
            steps[row, born - self.start] += size
            if died <= self.end:
                steps[row, died - self.start] -= size
        return steps.cumsum(axis=1)[:, :-1]

    def by_line(self, clock: int) -> list[dict[str, Any]]:
        """Return kind, line, bytes and number of the live storages, the most bytes first."""
        totals: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
        for born, died, size, kind, allocation in self.rows:
            if born <= clock < died:
                entry = totals[kind, allocation.origin.line]
                entry[0] += size
                entry[1] += 1
        rows = [
            {"kind": kind, "line": line, "bytes": size, "tensors": count}
            for (kind, line), (size, count) in totals.items()
        ]
        return sorted(rows, key=lambda row: -row["bytes"])


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of an operation's arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
