"""Generate text after prompts, for `mqo generate`.

The model is built from the arguments in the checkpoint and runs the source of this tree with its
quant types.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import preflight  # noqa: F401  (checks where megatron comes from)
import torch
from megatron.inference import load_model
from megatron.inference.checkpointing import read_args
from megatron.inference.generation import Choice, generate_tokens, started
from mqo.megatron.run.files import iteration_of


def generate(
    checkpoint: Path,
    platform: list[str],
    prompts: list[str],
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    cache: bool,
    tokenizer: Path | None,
    ignored: list[str],
) -> dict[str, Any]:
    """Generate the text after each prompt, one prompt at a time.

    Args:
        checkpoint: a folder of checkpoints, or of one iteration.
        platform: Megatron's flags for this machine.
        prompts: the texts to continue.
        tokens: the largest number per prompt.
        temperature, top_k, top_p: as in Choice.
        seed: of the samples.
        cache: whether to keep keys and values, instead of computing all tokens each time.
        tokenizer: its folder; None for the training's.
        ignored: unknown arguments of the checkpoint to ignore.
    """
    folder = load_model.find_checkpoint(checkpoint)
    args, model = load_model.load(folder, read_args(folder), platform, ignored)
    words = load_model.tokenizer_of(args, tokenizer)
    encoded = [[int(token) for token in words.tokenize(prompt)] for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        check_length(args, prompt, ids, tokens)
    choice = Choice(temperature, top_k, top_p)
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for prompt, ids in zip(prompts, encoded, strict=True):
        whole = started(model, args, len(ids) + tokens, use_cache=cache)
        limits = tokens, words.vocab_size, words.eod
        new = list(generate_tokens(whole, ids, *limits, choice, draw))
        text = words.detokenize(new) if new else ""
        ended = "length" if len(new) == tokens else "end of document"
        rows.append({"prompt": prompt, "text": text, "tokens": new, "ended": ended})
    return {"texts": rows, "iteration": iteration_of(folder)}


def check_length(args: Namespace, prompt: str, ids: list[int], tokens: int) -> None:
    """Raise SavedError if a prompt is empty, or too long for `tokens` more."""
    if not ids:
        raise load_model.SavedError(f"The prompt {prompt!r} has no token", "a text to continue")
    if len(ids) + tokens > args.max_position_embeddings:
        raise load_model.SavedError(
            f"A prompt of {len(ids)} tokens and {tokens} more are {len(ids) + tokens} tokens",
            f"at most {args.max_position_embeddings}, the positions of the model",
            "Use a shorter prompt, or a smaller --tokens",
        )
