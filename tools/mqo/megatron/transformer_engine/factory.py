"""The factory that Transformer Engine calls for a quantizer of each tensor of a layer."""

from typing import Any

from mqo.megatron.transformer_engine import passes
from mqo.megatron.transformer_engine.operand import Operand
from mqo.megatron.transformer_engine.releases import check_release, multiplies_plain_tensors

# The prefix of roles in releases that name a tensor by a string.
_PREFIX = "linear_"


def quantizer(role: Any) -> Any:
    """Return the quantizer of one tensor of the layer that runs.

    `role` is a string, an object with a `tensor_type`, or None, depending on the release. Output
    and the input's gradient have a quantizer, but are never quantized.

    Raises:
        EngineError: the release is not known, or cannot multiply for this layer; or the layer has
            not been named.
    """
    import transformer_engine

    version = transformer_engine.__version__
    check_release(version)
    said = role if isinstance(role, str) else getattr(role, "tensor_type", "")
    layer_pass = passes.running()
    tensor, gemm = layer_pass.take_slot(said.removeprefix(_PREFIX))
    operand = Operand(tensor, gemm, layer_pass)
    if multiplies_plain_tensors(version):
        from mqo.megatron.transformer_engine.plain import PlainQuantizer

        return PlainQuantizer.of(operand)
    from mqo.megatron.transformer_engine.paired import PairedQuantizer, check

    if isinstance(layer_pass, passes.Pass) and operand.is_quantized:
        check(layer_pass.module)
    return PairedQuantizer(operand)
