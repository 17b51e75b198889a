"""Save the input of a linear layer for the backward pass as codes.

With `save_activations = "packed"` the backward pass reads the input that fprop quantized. This
changes the numerics, not only the storage: wgrad's operand is rounded even if the type of wgrad is
'none'; with another type, it is rounded twice.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from mqo.quant.micro_batches import resume
from mqo.quant.packing import PackedTensor, pack
from mqo.quant.scales import Stored
from mqo.quant.spec import QuantSpec

# The attribute of a context for the metadata of the saved tensors.
_FORM = "mqo_packed_form"


def save_packed(
    ctx: Any,
    activation: Tensor,
    weight: Tensor,
    spec: QuantSpec,
    axis: int,
    seed: int | None,
    amax: Tensor | None,
) -> None:
    """Save `activation` as codes, and `weight` unchanged, in the `ctx` of an autograd.Function.

    They replace the saved tensors. `seed` and `amax` are the arguments of `fake_quantize`.
    """
    packed = pack(activation, spec, axis=axis, seed=seed, amax=amax)
    form = partial(
        PackedTensor, shape=packed.shape, dtype=packed.dtype, spec=packed.spec, axis=packed.axis
    )
    setattr(ctx, _FORM, form)
    ctx.save_for_backward(packed.codes, *packed.scales, weight)


def saved_operands(ctx: Any) -> tuple[Tensor, ...]:
    """Return the tensors that the forward pass saved in `ctx`: the unpacked input, and the weight.

    Patched Megatron calls this instead of `ctx.saved_tensors` at the start of the backward pass.
    """
    resume(ctx)
    form: Callable[[Tensor, Stored], PackedTensor] | None = getattr(ctx, _FORM, None)
    saved: tuple[Tensor, ...] = ctx.saved_tensors
    if form is None:
        return saved
    codes, *scales, weight = saved
    return form(codes, Stored(*scales)).unpack(), weight
