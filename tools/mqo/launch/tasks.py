"""Evaluate saved models in tasks of lm-evaluation-harness, under any training mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from mqo.display import Say
from mqo.errors import CheckpointError
from mqo.extras import require
from mqo.launch.evaluation import Request, checked_tokenizer, heading, measured
from mqo.launch.forward_pass import SavedModel
from mqo.launch.own_types import NO_OWN_TYPES, OwnTypes
from mqo.matrix import tables
from mqo.overlay.tree import Tree

HELD_OUT = "mqo_heldout"  # the task that reads the text of `evaluation.text`
HARNESS = "lm_eval"
_WIDE = 1e5  # values from here on do not fit with four decimals


@dataclass(frozen=True)
class Score:
    """A metric of a task of lm-evaluation-harness, for a checkpoint under a mode.

    `types` are {site: quant type} of the GEMMs that ran. `stderr` is None if the harness gives
    none, `shots` is None if the tasks of a group differ. For other fields see `evaluation.Loss`.
    """

    checkpoint: str
    mode: str
    types: Mapping[str, str]
    task: str
    metric: str
    filter: str
    value: Any
    stderr: float | None
    documents: int
    shots: int | None
    version: Any
    window: int
    iteration: int | None
    dtype: str
    seconds: float
    modelopt: str | None = None


def options(
    names: str,
    text: Request,
    *,
    folder: Path | None = None,
    tokenizer: Path | None = None,
    limit: int | None = None,
    shots: int | None = None,
) -> dict[str, Any]:
    """Return the request for comma-separated task names; `text` is the result of `evaluation.text`.

    Raises:
        CheckpointError: the names are empty, the folder is missing, or no task reads the text.
        SetupError: the package is missing.
    """
    require(HARNESS)
    tasks = list(dict.fromkeys(filter(None, map(str.strip, names.split(",")))))
    if not tasks:
        raise CheckpointError("--tasks is empty", expected=f"names such as {HELD_OUT}")
    if folder and not folder.is_dir():
        raise CheckpointError(
            f"The folder {folder} does not exist", expected="a folder with YAML files of tasks"
        )
    choice = text["choice"]
    given = [name for name in ("tokens", "data", "text") if choice.get(name)]
    if given and (given[0] == "tokens" or HELD_OUT not in tasks):
        raise CheckpointError(
            f"--{given[0]} changes nothing in these tasks",
            expected=f"--limit to shorten them; --data or --text only with the task {HELD_OUT}",
        )
    choice = {**choice, "tokenizer": checked_tokenizer(tokenizer)}
    own = {"names": tasks, "folder": folder and folder.resolve(), "limit": limit, "shots": shots}
    return {**text, "choice": choice, **own}


def evaluate(
    tree: Tree,
    models: Sequence[SavedModel],
    modes: Sequence[str],
    request: Request,
    report: Say = lambda line: None,
    own: OwnTypes = NO_OWN_TYPES,
) -> list[Score]:
    """Return the scores of each checkpoint under each mode, in this order.

    `request` is the result of `options`, `own` are the user's types.

    Raises:
        CheckpointError: a checkpoint or a task cannot be used.
        PluginError: a file of quantizers cannot be used, or changes nothing.
    """
    return [
        Score(model.name, quant.name, quant.types, **row, **facts)
        for model, quant, facts in measured(tree, models, modes, "tasks", request, report, own)
        for row in facts.pop("scores")
    ]


def score_lines(results: Sequence[Score]) -> list[str]:
    """Return one table per checkpoint, with one row per metric and mode."""
    text: list[str] = []
    for name in dict.fromkeys(score.checkpoint for score in results):
        scores = [score for score in results if score.checkpoint == name]
        text += [*_table(name, scores), ""]
    return text[:-1]


def _table(name: str, scores: Sequence[Score]) -> Iterator[str]:
    first = scores[0]
    yield heading(name, first.iteration, first.modelopt)
    yield f"windows of {first.window} tokens, {first.dtype}"
    width = max(25, *(len(tables.mode_label(score.mode, score.dtype)) for score in scores))
    yield f"{'task, metric':<21} {'arithmetic':<{width}} {'value':>11} {'stderr':>9} {'n':>7}"
    metric_of = attrgetter("task", "filter", "metric")
    metrics = list(dict.fromkeys(map(metric_of, scores)))
    together = sorted(scores, key=lambda score: metrics.index(metric_of(score)))
    for (task, filtered, shots), rows in groupby(together, attrgetter("task", "filter", "shots")):
        kinds = ["" if filtered == "none" else filtered, f"{shots}-shot" if shots else ""]
        yield ", ".join(filter(None, [task, *kinds]))
        for score in rows:
            mode = tables.mode_label(score.mode, score.dtype)
            error = "" if score.stderr is None else f"{score.stderr:.4f}"
            row = f"  {score.metric:<19} {mode:<{width}} {_shown(score.value):>11} {error:>9} "
            yield row + f"{score.documents:>7,}"


def _shown(value: Any) -> str:
    if not isinstance(value, float | int):
        return str(value)
    return f"{value:.4f}" if abs(value) < _WIDE else f"{value:.5g}"
