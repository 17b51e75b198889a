"""Track which Transformer Engine layer runs, and in which micro-batch, for its quantizers.

Transformer Engine calls the factory at the start of a layer's forward pass, newer releases in each
pass. Before that, a hook records the layer.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn import Module, Parameter

from mqo.megatron import linear
from mqo.megatron.transformer_engine.releases import EngineError
from mqo.quant.config import current
from mqo.quant.labels import LABEL
from mqo.quant.micro_batches import resume
from mqo.quant.quantization import PROCESS

_STATE = "mqo_pass"
_running: "Pass | None" = None


class Pass:
    """The running pass of one layer, which the quantizers of the layer share.

    A layer has one weight for each of its GEMMs. A module without linear GEMMs, such as a norm,
    also requests quantizers, but its tensors are not quantized.
    """

    def __init__(self, module: Module) -> None:
        self._module = ref(module)
        self._slots: Iterator[tuple[str, int]] = iter(())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pass":
        """Return the pass of the copied layer, while the layer is copied."""
        copied = memo.get(id(self.module))
        return self if copied is None else Pass(copied)

    @property
    def module(self) -> Module:
        """Return the layer."""
        module = self._module()
        assert module is not None  # the module owns this pass
        return module

    def weight(self, gemm: int) -> Parameter:
        """Return the current weight of a GEMM: a layer may get another one."""
        weights = linear.weights(self.module)
        if gemm >= len(weights):
            raise EngineError(
                f"{type(self.module).__name__} of Transformer Engine has weights in pieces, or in "
                "one tensor. Expected: one parameter for each GEMM"
            )
        return weights[gemm][1]

    def take_slot(self, tensor: str) -> tuple[str, int]:
        """Return the tensor and the GEMM of the quantizer that the engine requests now.

        It requests all quantizers of a direction in order, forward first: input, weight and output
        of each GEMM, then the gradients of output and input. `tensor` is its name of the tensor.
        Without linear GEMMs all are of outputs, which are not quantized.
        """
        if not linear.is_engines(self.module):
            return "output", 0
        slot = next(self._slots, None)
        if slot is None:
            names: tuple[str, ...] = ("grad_output", "grad_input")
            if tensor in ("input", "weight"):
                names = ("input", "weight", "output")
            gemms = range(len(linear.weights(self.module)))
            self._slots = iter([(name, gemm) for gemm in gemms for name in names])
            slot = next(self._slots)
        return slot

    def begin(self) -> None:
        """Record the start of a forward pass."""
        global _running
        _running, self._slots = self, iter(())
        if current().is_random and linear.is_engines(self.module):
            for _, weight in linear.weights(self.module):
                PROCESS.micro_batches.begin(getattr(weight, LABEL, ""))
            PROCESS.micro_batches.keep(self)

    def end(self, output: Any) -> None:
        """Set the same micro-batch for the backward pass of this forward pass."""
        global _running
        _running = None
        if not (current().is_random and linear.is_engines(self.module)):
            return
        kept = SimpleNamespace()
        PROCESS.micro_batches.keep(kept)
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda grad: self._resume(kept))

    def _resume(self, kept: SimpleNamespace) -> None:
        resume(kept)
        PROCESS.micro_batches.keep(self)


def running() -> Pass:
    """Return the running pass; EngineError if no layer with hooks runs."""
    if _running is None:
        raise EngineError(
            "Transformer Engine requests quantizers of a layer without a name. Expected: a call of "
            "label_layers and attach on the model before its first forward pass, as in the "
            "patched trainer"
        )
    return _running


def attach(model: Module) -> int:
    """Hook Transformer Engine's modules in `model`; return the number of modules with hooks.

    A module that has its hooks already is skipped.
    """
    modules = [module for module in model.modules() if linear.asks_for_quantizers(module)]
    for module in modules:
        if not hasattr(module, _STATE):
            setattr(module, _STATE, Pass(module))
            module.register_forward_pre_hook(_begin)
            # Also after a failed pass, so that another layer does not get its quantizers.
            module.register_forward_hook(_end, always_call=True)
    return len(modules)


def _begin(module: Module, args: object) -> None:
    del args
    getattr(module, _STATE).begin()


def _end(module: Module, args: object, output: Any) -> None:
    del args
    getattr(module, _STATE).end(output)
