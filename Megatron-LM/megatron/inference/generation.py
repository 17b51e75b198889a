"""Generate the tokens after a prompt, one at a time.

Keys and values are kept in Megatron's static inference context. Of Megatron's two engines, one
needs CUDA, and the other will be removed.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from mqo.megatron.run.gpt_blocks import FRESH, given_pattern
from torch import Tensor

from .load_model import watched_step

# Maps further tokens to the logits [vocabulary] after the last of them.
Model = Callable[[list[int]], Tensor]


@dataclass(frozen=True)
class Choice:
    """How the next token is drawn; temperature 0 takes the likeliest, without a draw.

    `top_k` keeps that many tokens (0: all), `top_p` the likeliest with this total probability.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


class Cached:
    """The model with a cache of keys and values: it computes each token once."""

    def __init__(self, model: Any, args: Namespace, longest: int) -> None:
        from megatron.core.inference.contexts import StaticInferenceContext

        self.model, self.args = model, args
        self.context = StaticInferenceContext(max_batch_size=1, max_sequence_length=longest)

    def __call__(self, ids: list[int]) -> Tensor:
        """Return the logits [vocabulary] after the last of these further tokens, float32."""
        context = self.context
        logits = run(self.model, self.args, ids, context.sequence_len_offset, context)
        context.sequence_len_offset += len(ids)
        context.enable_decode_mode()
        return logits


class Recomputed:
    """The model without a cache: it recomputes all tokens each time."""

    def __init__(self, model: Any, args: Namespace, longest: int) -> None:
        del longest
        self.model, self.args = model, args
        self.ids: list[int] = []

    def __call__(self, ids: list[int]) -> Tensor:
        """Return the same as `Cached`."""
        self.ids += ids
        return run(self.model, self.args, self.ids, 0)


def started(model: Any, args: Namespace, longest: int, *, use_cache: bool = True) -> Model:
    """Return the model before its first token; `longest` is the number of tokens of a text.

    The states of Mamba layers are not cached, so models with such layers recompute all tokens.
    """
    has_states = FRESH in (given_pattern(vars(args)) or "")
    return (Cached if use_cache and not has_states else Recomputed)(model, args, longest)


def run(model: Any, args: Namespace, ids: list[int], start: int, context: Any = None) -> Tensor:
    """Return the logits [vocabulary] after the last of `ids`, which begin at position `start`."""
    from mqo.megatron.device import accelerator_type

    tokens = torch.tensor([ids], device=accelerator_type())
    positions = torch.arange(start, start + len(ids), device=tokens.device)[None]
    with watched_step(model, args), torch.no_grad():
        return model(tokens, positions, None, inference_context=context)[0, -1].float().cpu()


def generate_tokens(
    model: Model,
    ids: list[int],
    count: int,
    vocabulary: int,
    end: int,
    choice: Choice,
    draw: torch.Generator,
) -> Iterator[int]:
    """Yield up to `count` tokens after `ids` and before `end`, each as soon as it is known.

    `vocabulary` is the number of tokens; the model may have more rows, of padding.
    """
    for _ in range(count):
        token = pick(model(ids)[:vocabulary], choice, draw)
        if token == end:
            return
        yield token
        ids = [token]


def pick(logits: Tensor, choice: Choice, draw: torch.Generator) -> int:
    """Draw a token from its logits [vocabulary]; if greedy, return the first of the likeliest."""
    if choice.temperature == 0:
        return int(logits.argmax())
    values, tokens = (logits / choice.temperature).sort(descending=True, stable=True)
    if choice.top_k:
        values = values[: choice.top_k]
    shares = values.softmax(0)
    # Keep the tokens that are needed to reach top_p; the likeliest is always kept.
    shares = shares.where(shares.cumsum(0) - shares < choice.top_p, 0)
    shares[0] = shares[0].clamp(min=torch.finfo(shares.dtype).tiny)
    return int(tokens[torch.multinomial(shares, 1, generator=draw)])
