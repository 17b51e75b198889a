"""Attention with quantized QK and PV products, for the models of transformers.

transformers has a table of attention functions; a model names one of them. Ours is `mqo`, and
`quantize_model` selects it. Needs transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mqo.quant.autocast import autocasted
from mqo.quant.gemms import model_operands
from mqo.quant.labels import LABEL
from mqo.quant.quantization import ModelQuantization

NAME = "mqo"
QUANTIZATION = "mqo_quantization"
_CHOICE = "_attn_implementation_internal"  # of a configuration
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

    modules = attention_modules(model)
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    before = [(config, getattr(config, _CHOICE, None)) for config in configs.values()]
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    model.set_attn_implementation(NAME)
    others = [
        name
        for name, module in modules.items()
        if getattr(getattr(module, "config", model.config), _CHOICE, None) != NAME
    ]
    if others or not modules or getattr(model.config, _CHOICE, None) != NAME:
        for config, choice in before:
            setattr(config, _CHOICE, choice)
        raise ValueError(
            f"transformers cannot replace the attention of {type(model).__name__}"
            f"{': ' if others else ''}{', '.join(others[:3])}; valid: models whose attention is in "
            "its AttentionInterface, or qk and pv 'none'"
        )
    for name, module in modules.items():
        setattr(module, QUANTIZATION, quantization)
        setattr(module, LABEL, name)


def attend(
    module: nn.Module,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """Return the context [b, q, h, d] and the probabilities [b, h, q, k], as transformers does.

    Args:
        module: the attention layer; `select` gave it its name and options.
        queries: [b, h, q, d].
        keys, values: [b, groups, k, d]; each group serves h / groups heads. They are rounded once.
        mask: added to the scores, [b, 1, q, k or more]; None for no mask.
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
    scale = queries.shape[-1] ** -0.5 if scaling is None else scaling
    context, probs = _attend(module, (queries, keys, values), mask, scale, dropout)
    return context, probs


def _compute(
    module: nn.Module,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    quantization: ModelQuantization = getattr(module, QUANTIZATION)
    quantization.begin_pass(module)
    queries, keys, values = (_tokens_first(x) for x in autocasted(*inputs) if x is not None)
    batch, heads = inputs[0].shape[:2]
    with torch.autocast(queries.device.type, enabled=False):
        qk = model_operands("qk", module, quantization)
        multiply = qk.product(torch.baddbmm)
        left, right = qk.lhs(queries), _repeated(qk.rhs(keys), batch * heads)
        buffer = left.new_empty(())  # its factor is 0
        scores = multiply(buffer, left.transpose(0, 1), right.permute(1, 2, 0), beta=0, alpha=scale)
        scores = scores.unflatten(0, (batch, heads))
        if mask is not None:
            scores = scores + mask[..., : scores.shape[-1]]
        probs = torch.softmax(scores, dim=-1, dtype=torch.float32).to(left.dtype)
        probs = nn.functional.dropout(probs, dropout, training=module.training)
        pv = model_operands("pv", module, quantization)
        multiply = pv.product(torch.bmm)
        left, right = pv.lhs(probs.flatten(0, 1)), _repeated(pv.rhs(values), batch * heads)
        context = multiply(left, right.transpose(0, 1)).unflatten(0, (batch, heads))
    return context.transpose(1, 2).contiguous(), probs


# Counters and alphas are read in Python.
_attend: Any = torch.compiler.disable(_compute)


def _tokens_first(x: Tensor) -> Tensor:
    """Return [tokens, b · heads, d], as at Megatron's sites, for [b, heads, tokens, d]."""
    return x.flatten(0, 1).transpose(0, 1)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Return [tokens, heads, d] for [tokens, groups, d], over all of the batch."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)
