"""Attention with quantized QK and PV products, for the models of transformers.

transformers has a table of attention functions; a model names one of them. Ours is `mqo`, and
`quantize_model` selects it. Needs transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mqo.quant.formats import NONE
from mqo.quant.gemms import operands_of
from mqo.quant.labels import LABEL
from mqo.quant.quantization import ModelQuantization

NAME = "mqo"
QUANTIZATION = "mqo_quantization"
# Arguments of some models that change the scores, which this function does not compute.
_UNKNOWN = ("softcap", "s_aux", "position_bias", "head_mask")


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return {name: module} of the modules that may call an attention function."""
    return {n: m for n, m in model.named_modules() if type(m).__name__.endswith("Attention")}


def select(model: Any, quantization: ModelQuantization) -> None:
    """Make all attention layers of a model of transformers call `attend`.

    Raises:
        ValueError: the model is none of transformers, or its attention is not in that table.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise ValueError(
            f"cannot quantize the attention of {type(model).__name__}; valid: models of "
            "transformers, or qk and pv 'none'"
        )
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise ValueError(
            f"transformers cannot replace the attention of {type(model).__name__}; valid: models "
            "whose attention is in its AttentionInterface, or qk and pv 'none'"
        )
    for name, module in attention_modules(model).items():
        setattr(module, QUANTIZATION, quantization)
        setattr(module, LABEL, name)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Return the context [b, q, h, d] and the probabilities [b, h, q, k], as transformers does.

    Args:
        module: the attention layer; `select` gave it its name and options.
        query: [b, h, q, d].
        key, value: [b, groups, k, d]; each group serves h / groups heads. They are rounded once.
        attention_mask: added to the scores, [b, 1, q, k or more]; None for no mask.
        scaling: the factor of the scores; None for d ** -0.5.
        dropout: the share of probabilities that become 0 in training, before they are rounded.
        others: must not have softcap, sinks, biases and masks of heads.

    Raises:
        ValueError: the layer was not selected, or needs one of `others`.
    """
    if present := [name for name in _UNKNOWN if others.get(name) is not None]:
        raise ValueError(
            f"{type(module).__name__} uses {', '.join(present)}; valid: attention without, or qk "
            "and pv 'none'"
        )
    if not hasattr(module, QUANTIZATION):
        raise ValueError(f"{type(module).__name__} has no options; valid: after quantize_model")
    output, probs = _attend(
        module, query, key, value, attention_mask, scaling or query.shape[-1] ** -0.5, dropout
    )
    return output, probs


def _compute(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    quantization: ModelQuantization = getattr(module, QUANTIZATION)
    quantization.begin_pass(getattr(module, LABEL))
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    batch, heads, queries, _ = query.shape
    types = quantization.options.asked
    with torch.autocast(query.device.type, enabled=False):
        qk = operands_of("qk", types.get("qk", NONE), module, quantization)
        product = qk.product(torch.baddbmm)
        left = qk.lhs(_tokens_first(query)).transpose(0, 1)
        right = _repeated(qk.rhs(_tokens_first(key)), batch, heads).transpose(0, 1)
        buffer = query.new_empty(())
        scores = product(buffer, left, right.transpose(1, 2), beta=0, alpha=scaling)
        scores = scores.view(batch, heads, queries, -1)
        if mask is not None:
            scores = scores + mask[..., : key.shape[-2]]
        probs = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        probs = nn.functional.dropout(probs, dropout, training=module.training)
        pv = operands_of("pv", types.get("pv", NONE), module, quantization)
        product = pv.product(torch.bmm)
        left = pv.lhs(probs.flatten(0, 1))
        right = _repeated(pv.rhs(_tokens_first(value)), batch, heads).transpose(0, 1)
        context = product(left, right).view(batch, heads, queries, -1)
    return context.transpose(1, 2).contiguous(), probs


# Counters and alphas are read in Python.
_attend: Any = torch.compiler.disable(_compute)


def _tokens_first(x: Tensor) -> Tensor:
    """Return [tokens, b · heads, d] for [b, heads, tokens, d], the shape of the sites in Megatron."""
    return x.flatten(0, 1).transpose(0, 1)


def _repeated(x: Tensor, batch: int, heads: int) -> Tensor:
    """Return [tokens, b · heads, d] for [tokens, b · groups, d]."""
    return x.repeat_interleave(batch * heads // x.shape[1], dim=1)
