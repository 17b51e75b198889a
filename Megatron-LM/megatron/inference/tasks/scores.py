"""Score a model on the harness's tasks."""

import os
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

import lm_eval
from lm_eval.defaults import DEFAULT_OTHER_SEED

from .model import HarnessModel

STDERR = "_stderr"


def evaluate(
    model: HarnessModel, loaded: Mapping[str, Any], limit: int | None, shots: int | None
) -> list[dict[str, Any]]:
    """Return a row for each task and metric, from at most `limit` documents per task.

    `shots` examples precede each question, unless a task allows none.
    """
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (own and shots is not None):
            task.set_config("num_fewshot", shots or 0)
        task.set_fewshot_seed(DEFAULT_OTHER_SEED)
    # To draw samples for standard errors, the harness would fork this process, which has torch's
    # threads, and could wait for the child forever. Without forks the samples are the same.
    os.environ["DISABLE_MULTIPROC"] = "1"
    results = lm_eval.evaluate(lm=model, task_dict=loaded, limit=limit, log_samples=False)
    return list(_rows(results))


def _rows(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for task, values in results["results"].items():
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
                "shots": results["n-shot"].get(task),
                "version": results["versions"].get(task),
            }


def _plain(value: Any) -> float | str:
    """Convert a metric for JSON: it may be NumPy's, or any type of a task's code."""
    return float(value) if isinstance(value, Real) else str(value)
