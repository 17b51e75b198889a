"""Generate text after prompts, for `mqo generate`.

    python Megatron-LM/tools/generate.py CHECKPOINT FACTS --prompts FILE [options] -- PLATFORM_FLAGS

FILE holds a JSON list of prompts; the result is written to FACTS, as JSON. The model is built from
the arguments in the checkpoint and runs the source of this tree with its quant types. A
user-correctable error is written to the file that MQO_FAILURE names.
"""

import argparse
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]


def main(argv: list[str]) -> None:
    """Generate; the arguments after `--` are Megatron's flags for this machine."""
    at = argv.index("--") if "--" in argv else len(argv)
    given = parser().parse_args(argv[:at])
    # Remove this folder from the path: numba would import its coverage.py as the package.
    sys.path[:1] = [str(ROOT / ".mqo_runtime"), str(ROOT)]
    import preflight  # noqa: F401  (checks where megatron comes from)
    from megatron.inference.load_model import write_result_or_exit

    write_result_or_exit(lambda: generate(given, argv[at + 1 :]), given.facts)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments before `--`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, help="default: the training's")
    parser.add_argument("--tokens", type=int, default=64, help="largest number per prompt")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--ignore-argument", action="append", default=[], help="an unknown argument to ignore"
    )
    parser.add_argument("--no-cache", action="store_true", help="recompute all tokens each time")
    return parser


def generate(given: Namespace, platform: list[str]) -> dict[str, Any]:
    """Generate the text after each prompt, one prompt at a time."""
    from megatron.inference import load_model
    from megatron.inference.generation import Choice, generate_tokens, started
    from mqo.megatron.run.errors import reading
    from mqo.megatron.run.files import iteration_of
    from mqo.megatron.run.untrusted import read_json

    folder = load_model.find_checkpoint(given.checkpoint)
    saved = load_model.read_args(folder)
    args, model = load_model.load(folder, saved, platform, given.ignore_argument)
    tokenizer = load_model.tokenizer_of(args, given.tokenizer)
    with reading():
        prompts = read_json(given.prompts)
    encoded = [[int(token) for token in tokenizer.tokenize(prompt)] for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        check_length(args, prompt, ids, given.tokens)
    choice = Choice(given.temperature, given.top_k, given.top_p)
    draw = torch.Generator().manual_seed(given.seed)
    rows = []
    for prompt, ids in zip(prompts, encoded, strict=True):
        longest = len(ids) + given.tokens
        whole = started(model, args, longest, use_cache=not given.no_cache)
        limits = given.tokens, tokenizer.vocab_size, tokenizer.eod
        new = list(generate_tokens(whole, ids, *limits, choice, draw))
        text = tokenizer.detokenize(new) if new else ""
        ended = "length" if len(new) == given.tokens else "end of document"
        rows.append({"prompt": prompt, "text": text, "tokens": new, "ended": ended})
    return {"texts": rows, "iteration": iteration_of(folder)}


def check_length(args: Namespace, prompt: str, ids: list[int], tokens: int) -> None:
    """Raise SavedError if a prompt is empty, or too long for `tokens` more."""
    from megatron.inference.load_model import SavedError

    if not ids:
        raise SavedError(f"The prompt {prompt!r} has no token", "a text to continue")
    if len(ids) + tokens > args.max_position_embeddings:
        raise SavedError(
            f"A prompt of {len(ids)} tokens and {tokens} more are {len(ids) + tokens} tokens",
            f"at most {args.max_position_embeddings}, the positions of the model",
            "Use a shorter prompt, or a smaller --tokens",
        )


if __name__ == "__main__":
    main(sys.argv[1:])
