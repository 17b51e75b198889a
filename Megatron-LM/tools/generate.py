"""Goes on with prompts: what `mqo generate` prints.

    python Megatron-LM/tools/generate.py CHECKPOINT FACTS --prompts FILE [options] -- PLATFORM_FLAGS

FILE holds a JSON list of prompts; FACTS is written, JSON. The model is built from the arguments in
the checkpoint and runs this tree's source with its quant types. Keys and values are kept in
Megatron's static inference context; of its engines one needs CUDA, and the other is to be removed.
A user-correctable error is written to the file that MQO_FAILURE names.
"""

import argparse
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]

# The logits [vocabulary] behind the last of some further tokens.
Model = Callable[[list[int]], Tensor]


@dataclass(frozen=True)
class Choice:
    """How the next token is drawn: temperature 0 takes the likeliest, and draws nothing.

    `top_k` keeps that many (0: all), `top_p` the likeliest that have this share together.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def main(argv: list[str]) -> None:
    """Generate as the arguments say; behind `--` stand those that say what the machine has."""
    at = argv.index("--") if "--" in argv else len(argv)
    given = parser().parse_args(argv[:at])
    # In the place of this folder, whose coverage.py numba would take for the package.
    sys.path[0] = str(ROOT)
    import preflight  # noqa: F401  (checks where megatron comes from)
    from megatron.inference.load_model import write_result_or_exit

    write_result_or_exit(lambda: generate(given, argv[at + 1 :]), given.facts)


def parser() -> argparse.ArgumentParser:
    """The arguments before `--`."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("checkpoint", type=Path)
    made.add_argument("facts", type=Path)
    made.add_argument("--prompts", type=Path, required=True)
    made.add_argument("--tokenizer", type=Path, help="by default the training's")
    made.add_argument("--tokens", type=int, default=64, help="at most, a prompt")
    made.add_argument("--temperature", type=float, default=0.0)
    made.add_argument("--top-k", type=int, default=0)
    made.add_argument("--top-p", type=float, default=1.0)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--no-cache", action="store_true", help="compute the whole text each time")
    return made


def generate(given: Namespace, platform: list[str]) -> dict[str, Any]:
    """The prompts, one after the other, and what follows each."""
    from megatron.inference import load_model

    folder = load_model.find_checkpoint(given.checkpoint)
    args, model = load_model.load(folder, load_model.read_args(folder), platform)
    tokenizer = load_model.tokenizer_of(args, given.tokenizer)
    prompts = json.loads(given.prompts.read_text(encoding="utf-8"))
    encoded = [[int(token) for token in tokenizer.tokenize(prompt)] for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        check_length(args, prompt, ids, given.tokens)
    choice = Choice(given.temperature, given.top_k, given.top_p)
    draw = torch.Generator().manual_seed(given.seed)
    kind = Recomputed if given.no_cache else Cached
    rows = []
    for prompt, ids in zip(prompts, encoded, strict=True):
        whole = kind(model, args, len(ids) + given.tokens)
        limits = given.tokens, tokenizer.vocab_size, tokenizer.eod
        new = list(generate_tokens(whole, ids, *limits, choice, draw))
        text = tokenizer.detokenize(new) if new else ""
        ended = "length" if len(new) == given.tokens else "end of document"
        rows.append({"prompt": prompt, "text": text, "tokens": new, "ended": ended})
    return {"texts": rows, "iteration": load_model.iteration(folder)}


def check_length(args: Namespace, prompt: str, ids: list[int], tokens: int) -> None:
    """SavedError where a prompt is nothing, or has no room for what shall follow it."""
    from megatron.inference.load_model import SavedError

    if not ids:
        raise SavedError(f"The prompt {prompt!r} holds no token", "a text to go on with")
    if len(ids) + tokens > args.max_position_embeddings:
        raise SavedError(
            f"A prompt of {len(ids)} tokens and {tokens} more are {len(ids) + tokens}",
            f"at most {args.max_position_embeddings}, the positions that the model has",
            "Give a shorter prompt, or a smaller --tokens",
        )


class Cached:
    """The model with a cache of keys and values: each token goes through it once."""

    def __init__(self, model: Any, args: Namespace, longest: int) -> None:
        from megatron.core.inference.contexts import StaticInferenceContext

        self.model, self.args = model, args
        self.context = StaticInferenceContext(max_batch_size=1, max_sequence_length=longest)

    def __call__(self, ids: list[int]) -> Tensor:
        """The logits [vocabulary] behind the last of these further tokens, float32."""
        context = self.context
        logits = run(self.model, self.args, ids, context.sequence_len_offset, context)
        context.sequence_len_offset += len(ids)
        context.enable_decode_mode()
        return logits


class Recomputed:
    """The model without a cache: all tokens so far go through it again."""

    def __init__(self, model: Any, args: Namespace, longest: int) -> None:
        del longest
        self.model, self.args, self.ids = model, args, []

    def __call__(self, ids: list[int]) -> Tensor:
        """Return what `Cached` does."""
        self.ids += ids
        return run(self.model, self.args, self.ids, 0)


def run(model: Any, args: Namespace, ids: list[int], start: int, context: Any = None) -> Tensor:
    """The logits [vocabulary] behind the last of `ids`, the first of which is at place `start`."""
    from megatron.device import accelerator_type
    from megatron.inference.load_model import watched_step

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
    """Up to `count` tokens behind `ids` and before `end`, each as soon as it is known.

    `vocabulary` are the tokens that there are: the model may have rows of padding.
    """
    for _ in range(count):
        token = pick(model(ids)[:vocabulary], choice, draw)
        if token == end:
            return
        yield token
        ids = [token]


def pick(logits: Tensor, choice: Choice, draw: torch.Generator) -> int:
    """A token by its logits [vocabulary]; of several that are as likely the first, if greedy."""
    if choice.temperature == 0:
        return int(logits.argmax())
    values, tokens = (logits / choice.temperature).sort(descending=True, stable=True)
    if choice.top_k:
        values = values[: choice.top_k]
    shares = values.softmax(0)
    # Those without which the share would not be reached; the likeliest is always one.
    shares = shares.where(shares.cumsum(0) - shares < choice.top_p, 0)
    shares[0] = shares[0].clamp(min=torch.finfo(shares.dtype).tiny)
    return int(tokens[torch.multinomial(shares, 1, generator=draw)])


if __name__ == "__main__":
    main(sys.argv[1:])
