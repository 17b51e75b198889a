"""What the harness measures of a model on tasks, as rows."""

import os
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

import lm_eval
from lm_eval.defaults import DEFAULT_OTHER_SEED

from .model import SavedModel

STDERR = "_stderr"


def evaluate(
    model: SavedModel, loaded: Mapping[str, Any], limit: int | None, shots: int | None
) -> list[dict[str, Any]]:
    """Return a row for each task and metric; `limit` is in documents of a task.

    `shots` examples come before a question, unless a task allows none.
    """
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (own and shots is not None):
            task.set_config("num_fewshot", shots or 0)
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    # The harness would fork this process, which has torch's threads, to draw samples for standard
    # errors, and could wait for such a child forever. Without it draws the same ones.
    os.environ["DISABLE_MULTIPROC"] = "1"
    found = lm_eval.evaluate(lm=model, task_dict=loaded, limit=limit, log_samples=False)
    return list(_rows(found))


def _rows(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for task, values in found["results"].items():
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith(STDERR):
                continue
            error = _plain(values.get(f"{metric}{STDERR},{filtered}"))
            yield {
                "task": task,
                "metric": metric,
                "filter": filtered,
                "value": _plain(value),
                "stderr": error if isinstance(error, float) else None,
                "documents": values["sample_len"],
                "shots": found["n-shot"].get(task),
                "version": found["versions"].get(task),
            }


def _plain(value: Any) -> float | str:
    """Return a value for JSON: metrics may be NumPy's, or any type of a task's own code."""
    return float(value) if isinstance(value, Real) else str(value)
