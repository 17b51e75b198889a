"""Measure the subsets of a saved model's GEMMs, and rank them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from mqo.display import Count, Display, Say
from mqo.launch.checkpoints import EVALUATE
from mqo.launch.evaluation import Request, heading, run
from mqo.launch.forward_pass import ForwardPass, SavedModel
from mqo.overlay.tree import Tree
from mqo.quant.subsets import Change

GRADIENT, LOSS = "gradient", "loss"
RANKS = (GRADIENT, LOSS)


@dataclass(frozen=True)
class Sensitivity:
    """The changes of a checkpoint's loss and gradient under a recipe or mode, the largest first.

    `loss` is that without quantization, `everything` the change with all of the recipe.
    """

    checkpoint: str
    quantization: str
    by: str
    rank: str
    loss: float
    tokens: int
    window: int
    text: tuple[str, ...]
    iteration: int | None
    dtype: str
    seconds: float
    everything: Change
    changes: tuple[Change, ...]

    @property
    def title(self) -> str:
        """Return what was measured, in a line."""
        name = heading(self.checkpoint, self.iteration, None)
        return f"{name}: {self.quantization}, one {self.by} at a time"


def measure(
    tree: Tree,
    model: SavedModel,
    quant: ForwardPass,
    label: str,
    by: str,
    rank: str,
    request: Request,
    report: Say = lambda line: None,
) -> Sensitivity:
    """Return the changes with each subset of the kind `by` quantized, ranked by `rank`.

    `request` names the text, as `evaluation.text` does; `label` names the quantization.

    Raises:
        CheckpointError: the checkpoint or the text cannot be used, or nothing is quantized.
    """
    with Display.around(report).live() as display:
        display(f"{model.name}: {label}")
        watch = Count(display, f"  {label}").show
        more = {**request, "by": by}
        facts = run(tree, model, quant, EVALUATE, "sensitivity", more, watch=watch)
    del facts["modelopt"]  # the guard ends the program for a model that ModelOpt quantizes
    changes = [Change.from_table(row) for row in facts.pop("changes")]
    return Sensitivity(
        checkpoint=model.name,
        quantization=label,
        by=by,
        rank=rank,
        everything=Change.from_table(facts.pop("everything")),
        changes=tuple(sorted(changes, key=partial(_size, rank), reverse=True)),
        text=tuple(facts.pop("text")),
        **facts,
    )


def _size(rank: str, change: Change) -> float:
    """Return what ranks a change; a quantity that is not a number ranks first."""
    value: float = getattr(change, rank)
    return math.inf if math.isnan(value) else value


def table_lines(result: Sensitivity) -> list[str]:
    """Return the ranked changes as a table."""
    rows = [result.everything, *result.changes]
    width = max(len(row.name) for row in rows)
    text = [result.title, *result.text]
    text.append(f"{result.tokens:,} tokens in windows of {result.window}, {result.dtype}")
    text.append(f"loss without quantization: {result.loss:.4f}")
    text.append(f"{result.by:<{width}} {'gradient':>9} {'loss':>9} {'+/-':>8} {'weights':>13}")
    for row in rows:
        text.append(
            f"{row.name:<{width}} {row.gradient:>9.2%} {row.loss:>+z9.5f} {row.loss_error:>8.5f} "
            f"{row.weights:>13,}"
        )
    return text
