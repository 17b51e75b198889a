"""Choose the path of a DotProductAttention from --attention-backend and what is supported.

Its patched `forward` calls this module with the layer, which is only read.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mqo.megatron.attention.backward import BackwardOperands
from mqo.megatron.attention.masks import is_causal
from mqo.megatron.attention.packed import document_starts
from mqo.megatron.attention.paths import (
    FusedAttentionError,
    chunked_context,
    dropout_of,
    fused_context,
    part_of,
)
from mqo.quant.config import current
from mqo.quant.formats import NONE
from mqo.quant.labels import LABEL, UNLABELED, is_exempt
from mqo.quant.quantization import PROCESS
from mqo.quant.spec import OperandSpec, QuantSpec

# --attention-backend: flash and fused require a fused kernel, unfused and local upstream's path.
# With auto, and in a release without the option, a path without the scores is used if possible.
DEMANDED = ("flash", "fused")
REFUSED = ("unfused", "local")

# (qk operands, query, key, value, upstream's RNG tracker) -> context
Attend = Callable[..., Tensor]


def without_scores(
    layer: Any,
    types: Mapping[str, str],
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    packed: Any = None,
    backward: BackwardOperands | None = None,
) -> Attend | None:
    """Return the function that computes the attention of `layer`; None for upstream's own path.

    Args:
        layer: a DotProductAttention.
        types: {site: quant type} from the source of its class.
        query: [sq, b, np, hn]; packed, [t, np, hn].
        key: [sk, b, ng, hn]; packed, [t, ng, hn].
        mask: [..., sq, sk], True for a hidden key; None for a causal mask.
        packed: upstream's PackedSeqParams, or None. With them the mask is ignored.
        backward: the quantizers of the backward pass's products.

    Raises:
        FusedAttentionError: the backend is flash or fused, and no fused kernel supports the call;
            upstream's own path does not support packed sequences; or a product of the backward pass
            has a type, and the call is not supported in chunks.
    """
    backend = getattr(layer.config, "attention_backend", "auto")
    backend = getattr(backend, "name", backend)
    starts = () if packed is None else _starts(layer, packed, query.size(0))
    if backward and backward.typed:
        return _with_backward(layer, types, backend, query, key, mask, packed, backward)
    attend, why = _choose(
        layer, types, backend, query, key, mask if packed is None else None, starts
    )
    if attend is not None:
        return attend
    if backend in DEMANDED:
        raise FusedAttentionError(
            f"{_name(layer)} cannot run fused: {why}. Expected: a layer that a fused kernel "
            f"supports, because of --attention-backend {backend}. Use `--attention-backend auto` "
            "to allow another path"
        )
    if packed is not None:
        raise FusedAttentionError(
            f"{_name(layer)} does not support packed sequences: {why}. Expected: a layer that runs "
            "without stored scores, and `--attention-backend auto`"
        )
    if backend not in REFUSED and "pv" in types and _probs(layer, types["pv"]).changes:
        _say(f"{_name(layer)}: {why}")
    return None


def _choose(
    layer: Any,
    types: Mapping[str, str],
    backend: str,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    starts: tuple[int, ...],
) -> tuple[Attend | None, str]:
    """Return the function, or None and the reason; packed documents begin at `starts`."""
    if "pv" not in types:
        return None, "its source has no plain literal for pv"
    if backend in REFUSED:
        return None, f"--attention-backend is {backend}"
    probs, pv_type = _probs(layer, types["pv"]), types["pv"]
    rounded = probs.spec
    attend: Attend
    if not probs.changes:
        why = obstacle_to_kernels(layer, query, key, mask)
        attend = partial(fused_context, layer, pv_type, starts)
    elif backend in DEMANDED:
        is_none = rounded.quant_type == NONE
        done = "transforms" if is_none else f"quantizes to {rounded.quant_type}"
        return None, f"no fused kernel {done} its probabilities"
    else:
        why = obstacle_to_chunks(layer, rounded, query, key, mask)
        causal = mask is None or is_causal(mask, query.size(0), key.size(0))
        attend = partial(chunked_context, layer, pv_type, starts, None if causal else mask)
    return (None, why) if why else (attend, "")


def _with_backward(
    layer: Any,
    types: Mapping[str, str],
    backend: str,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    packed: Any,
    backward: BackwardOperands,
) -> Attend:
    """Return the function for a layer whose backward pass has types; FusedAttentionError if none.

    Takes the arguments of `without_scores`.
    """
    why, pv_type = "", types.get("pv", NONE)
    if "pv" not in types:
        why = "its source has no plain literal for pv"
    elif backend in (*DEMANDED, *REFUSED):
        why = f"--attention-backend is {backend}"
    elif packed is not None:
        why = "its sequences are packed documents"
    elif part_of(layer)[1] > 1:
        why = "--context-parallel-size is more than 1"
    elif mask is not None and not is_causal(mask, query.size(0), key.size(0)):
        why = "its attention mask is not the plain causal one"
    why = why or obstacle_to_chunks(layer, _probs(layer, pv_type).spec, query, key, None)
    if why:
        sites = ", ".join(backward.typed)
        raise FusedAttentionError(
            f"{_name(layer)} cannot quantize the products of its backward pass ({sites}): {why}. "
            "Expected: causal attention in chunks, with `--attention-backend auto`; or type 'none' "
            "for these products"
        )
    return partial(chunked_context, layer, pv_type, (), None, backward=backward)


def _starts(layer: Any, packed: Any, tokens: int) -> tuple[int, ...]:
    """Return the start of each document; FusedAttentionError if they cannot be separated."""
    if part_of(layer)[1] > 1:
        why = "packed sequences do not support context parallelism"
        raise FusedAttentionError(f"{_name(layer)}: {why}. Expected: --context-parallel-size 1")
    try:
        return document_starts(packed, tokens)
    except ValueError as error:
        raise FusedAttentionError(f"{_name(layer)}: {error}") from error


def obstacle_to_kernels(layer: Any, query: Tensor, key: Tensor, mask: Tensor | None) -> str:
    """Return why no fused kernel of torch can run `layer` on these tensors; "" if one can.

    Takes the arguments of `without_scores`.
    """
    queries, keys, device = query.size(0), key.size(0), query.device.type
    if why := _unusual(layer):
        return why
    if layer.scale_mask_softmax.scale is not None:
        return "--apply-query-key-layer-scaling scales its scores twice"
    if device not in ("cpu", "cuda"):
        return f"the device {device} has no fused kernel"
    if device == "cpu" and dropout_of(layer):
        return "no fused kernel for CPUs supports dropout"
    if 1 < queries * part_of(layer)[1] != keys:
        return f"it has {queries} queries for {keys} keys"
    # Last, as it reads a tensor.
    if mask is not None and not is_causal(mask, queries, keys):
        return "its attention mask is not the plain causal one"
    return ""


def obstacle_to_chunks(
    layer: Any, rounded: QuantSpec, query: Tensor, key: Tensor, mask: Tensor | None
) -> str:
    """Return why `layer` cannot run in chunks; "" if it can.

    `rounded` describes the quantization of its probabilities; the rest is as in `without_scores`.
    """
    queries, keys = query.size(0), key.size(0)
    if why := _unusual(layer):
        return why
    if rounded.plugin:
        return f"{rounded.quant_type} is a quantizer in Python, which takes all probabilities"
    if dropout_of(layer):
        return "--attention-dropout drops probabilities"
    if mask is None or is_causal(mask, queries, keys):
        if 1 < queries * part_of(layer)[1] != keys:
            return f"it has {queries} queries for {keys} keys"
        causal = queries > 1
    else:
        shapes = [(n, 1, queries, keys) for n in (1, query.size(1))]
        if mask.dtype != torch.bool or tuple(mask.shape) not in shapes:
            return f"its attention mask is {list(mask.shape)} {mask.dtype}"
        causal = False
    if rounded.scales_by_tensor and not causal and not current().unnormalized_probs:
        return (
            f"{rounded.quant_type} scales by the amax of all probabilities, without a causal mask"
        )
    return ""


def _name(layer: Any) -> str:
    return getattr(layer, LABEL, f"attention layer {layer.layer_number}")


def _unusual(layer: Any) -> str:
    """Return a feature of `layer` that needs stored scores; "" if there is none."""
    mask_type = getattr(layer.attn_mask_type, "name", None)
    if mask_type != "causal":
        return f"its mask type is {mask_type}, not causal"
    if getattr(layer.scale_mask_softmax, "window_size", None) is not None:
        return "it has a sliding window"
    if getattr(layer, "softmax_offset", None) is not None:
        return "its softmax has an offset"
    return ""


def _probs(layer: Any, quant_type: str) -> OperandSpec:
    """Return the current quantization of the probabilities; `quant_type` is in the source."""
    if is_exempt(layer):
        return OperandSpec(QuantSpec(NONE))
    name = getattr(layer, LABEL, UNLABELED)
    return current().operand_spec("pv", "probs", name, PROCESS.scheduled("pv", quant_type))


_said: list[str] = []


def _say(why: str) -> None:
    """Print the first layer that keeps its scores, and the reason, once."""
    if not _said and (not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0):
        _said.append(why)
        print(f"mqo: attention with a quantized pv stores its s x s scores: {why}", flush=True)
