"""Provide the factory that Transformer Engine calls for a quantizer of each tensor."""

from typing import Any

from mqo.megatron.transformer_engine.operand import Operand
from mqo.megatron.transformer_engine.passes import running
from mqo.megatron.transformer_engine.releases import check_release, multiplies_plain_tensors

# The prefix of roles in releases whose roles are strings.
_PREFIX = "linear_"


def quantizer(role: Any) -> Any:
    """Return the quantizer of one tensor of the layer that runs.

    `role` is a string, an object with a `tensor_type`, or None, depending on the release. Outputs
    and gradients of inputs have a quantizer that does nothing.

    Raises:
        EngineError: the release is unknown, or does not support this layer; or the layer has no
            name.
    """
    import transformer_engine

    version = transformer_engine.__version__
    check_release(version)
    name = role if isinstance(role, str) else getattr(role, "tensor_type", "")
    layer_pass = running()
    tensor, gemm = layer_pass.take_slot(name.removeprefix(_PREFIX))
    operand = Operand(tensor, gemm, layer_pass)
    if multiplies_plain_tensors(version):
        from mqo.megatron.transformer_engine.plain import PlainQuantizer

        return PlainQuantizer.for_operand(operand)
    from mqo.megatron.transformer_engine.paired import PairedQuantizer, check

    if operand.is_quantized:
        check(layer_pass.module)
    return PairedQuantizer(operand)
