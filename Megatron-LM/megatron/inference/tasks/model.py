"""A saved model with the harness's interface: log-likelihoods of texts, and generation."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from mqo.megatron.device import accelerator_type
from mqo.megatron.run.errors import SavedError
from torch.nn.functional import cross_entropy

from ..generation import Choice, generate_tokens, started
from ..load_model import batches, watched_step
from .registry import GENERATED

Told = Callable[[str, int, int], None]
Scored = tuple[Any, list[int], list[int]]  # the harness's label, the context, the scored tokens


class HarnessModel(TemplateLM):
    """A model on one process, with the quant types of its source.

    `told` is called with the unit, the number that are done, and their total.
    """

    def __init__(self, model: Any, args: Namespace, tokenizer: Any, told: Told) -> None:
        super().__init__()
        self.model, self.args, self.tokenizer, self.told = model, args, tokenizer, told

    @property
    def eot_token_id(self) -> int:
        """The token that ends a document and begins a text."""
        return self.tokenizer.eod

    def tok_encode(self, string: str, *rest: Any, **options: Any) -> list[int]:
        """Return the token ids of a text as in training, without a token at its start."""
        return [int(token) for token in self.tokenizer.tokenize(string)]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return each text's log-likelihood in nats, in windows of the sequence length."""
        rows, counts = [], [0]
        for request in requests:
            pieces = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.args.seq_length, 1
            )
            rows += [(None, *make_disjoint_window(piece)) for piece in pieces]
            counts.append(len(rows))
        values = [value for value, _ in self._loglikelihood_tokens(rows)]
        return [sum(values[first:last]) for first, last in pairwise(counts)]

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], **options: Any
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of the scored tokens, and whether all are the likeliest.

        The first tokens are left out if a window is too short.
        """
        rows = [(self._cut(before, scored), len(scored)) for _, before, scored in requests]
        scores: dict[int, tuple[float, bool]] = {}
        done, total = 0, sum(len(tokens) - 1 for tokens, _ in rows)
        length = lambda n: len(rows[n][0])  # noqa: E731
        # No padding: with blocks along the tokens it would change the scales of other tokens.
        order = sorted(range(len(rows)), key=length)
        for batch in batches(order, self.args.micro_batch_size, length):
            scores |= zip(batch, self._score([rows[n] for n in batch]), strict=True)
            done += len(batch) * (length(batch[0]) - 1)
            self.told("tokens", done, total)
        return [scores[n] for n in range(len(rows))]

    def _cut(self, before: list[int], scored: list[int]) -> list[int]:
        longest = self.args.seq_length
        if len(scored) > longest:
            raise SavedError(
                f"A task has an answer of {len(scored)} tokens",
                f"at most {longest}, the window of the model",
            )
        return (before + scored)[-(longest + 1) :]

    def _score(self, batch: Sequence[tuple[list[int], int]]) -> Iterator[tuple[float, bool]]:
        """Score the last tokens of rows of equal length; each row gives their number."""
        ids = torch.tensor([tokens for tokens, _ in batch], device=accelerator_type())
        tokens = ids[:, :-1].contiguous()
        positions = torch.arange(tokens.size(1), device=ids.device).expand_as(tokens)
        with watched_step(self.model, self.args), torch.no_grad():
            logits = self.model(tokens, positions, None)
        for row, values, (_, count) in zip(ids, logits, batch, strict=True):
            last, wanted = values[-count:].float(), row[-count:]
            losses = cross_entropy(last, wanted, reduction="none")
            likeliest = last[:, : self.tokenizer.vocab_size].argmax(-1)
            yield -losses.double().sum().item(), bool((likeliest == wanted).all())

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Generate the most likely tokens after each text, up to a stop or a maximum length."""
        answers = []
        for request in requests:
            context, options = request.args
            settings = normalize_gen_kwargs(options, GENERATED)
            stops = [stop for stop in handle_stop_sequences(settings.get("until"), None) if stop]
            answers.append(self._continued(context, stops, settings["max_gen_toks"]))
            self.told("answers", len(answers), len(requests))
        return answers

    def _continued(self, context: str, stops: list[str], count: int) -> str:
        room = self.args.seq_length - count
        ids = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        model = started(self.model, self.args, len(ids) + count)
        limits = count, self.tokenizer.vocab_size, self.tokenizer.eod
        new: list[int] = []
        text = ""
        for token in generate_tokens(model, ids, *limits, Choice(), torch.Generator()):
            new.append(token)
            text = self.tokenizer.detokenize(new)
            if any(stop in text for stop in stops):
                break
        return postprocess_generated_text(text, stops, None)
