"""Keep a teacher's outputs in one pass over micro-batches, and reuse them in the next."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import modelopt.torch.distill as mtd
from torch import nn

# The attribute in which ModelOpt keeps the output of a compared layer until the loss is computed.
_CAPTURED = "_intermediate_output"


@dataclass(frozen=True)
class _Outputs:
    """The outputs of a teacher's last and compared layers for one micro-batch."""

    last: Any
    compared: list[Any]


class TeacherOutputs:
    """The outputs of a frozen teacher's layers, for each micro-batch in order.

    The hidden states after the last layer of this pipeline stage are kept, and the outputs of
    compared layers before it. Embedding and output layer run in both passes: logits are larger
    than all kept outputs together, and the backward pass overwrites them.
    """

    def __init__(self, student: mtd.DistillationModel) -> None:
        self._decoder = student.teacher_model.decoder
        inner = {layer for layer in self._decoder.modules() if layer is not self._decoder}
        self._compared = [layer for _, layer in student._layers_to_loss if layer in inner]
        self._kept: deque[_Outputs] = deque()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the outputs of each forward pass in this block."""
        hook = self._decoder.register_forward_hook(self._keep)
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """In this block, return the kept outputs in order instead of running the layers."""
        self._decoder.forward = self._repeat
        try:
            yield
        finally:
            del self._decoder.forward
            self._kept.clear()

    def _keep(self, decoder: nn.Module, given: Any, output: Any) -> None:
        del decoder, given
        captured = [getattr(layer, _CAPTURED) for layer in self._compared]
        self._kept.append(_Outputs(output, captured))

    def _repeat(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        outputs = self._kept.popleft()
        for layer, output in zip(self._compared, outputs.compared, strict=True):
            setattr(layer, _CAPTURED, output)
        return outputs.last
