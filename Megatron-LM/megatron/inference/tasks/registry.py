"""Load tasks and their data by name: those of the harness, of a folder, and of this project."""

import difflib
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from lm_eval import defaults
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from mqo.megatron.run.errors import SavedError

HELD_OUT = "mqo_heldout"
YAML = Path(__file__).with_name(f"{HELD_OUT}.yaml")
GENERATED = 256  # maximum tokens of an answer, unless a task sets it


def load(
    names: Sequence[str], folder: Path | None, documents: Callable[[], Iterable[str]]
) -> dict[str, dict[str, Any]]:
    """Load tasks by their names in the harness or in a folder of YAML; `documents` are ours.

    Return the argument of the harness's `evaluate`: {"tasks", "groups", "group_map"}.

    Raises:
        SavedError: a task is unknown, cannot be loaded, or its data is not on this disk.
    """
    # As in the harness's command: some tasks shuffle.
    random.seed(defaults.DEFAULT_RANDOM_SEED)
    np.random.seed(defaults.DEFAULT_OTHER_SEED)
    torch.manual_seed(defaults.DEFAULT_OTHER_SEED)
    manager = _manager([name for name in names if name != HELD_OUT], folder)
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        try:
            tasks = manager.load([_held_out(documents()) if name == HELD_OUT else name])
        except SavedError:
            raise
        except Exception as error:  # code that a YAML names can raise anything
            raise _refusal(name, error) from error
        for kind, rows in tasks.items():
            loaded[kind] |= rows
    return loaded


def check(tasks: Iterable[Any], length: int) -> None:
    """Raise SavedError if a task needs more than a text model with a window of `length` tokens."""
    for task in tasks:
        name = task.task_name
        if getattr(task, "UNSAFE_CODE", False):
            raise SavedError(
                f"The task {name} runs code that the model writes", "a task that does not"
            )
        if getattr(task, "MULTIMODAL", False):
            raise SavedError(f"The task {name} has images or audio", "a task with only text")
        if task.OUTPUT_TYPE != "generate_until":
            continue
        settings = normalize_gen_kwargs(task.config.generation_kwargs or {}, GENERATED)
        if settings.get("do_sample"):
            raise SavedError(f"The task {name} samples its answers", "a task with greedy answers")
        if settings["max_gen_toks"] >= length:
            raise SavedError(
                f"An answer of the task {name} has up to {settings['max_gen_toks']} tokens",
                f"fewer than {length}, the window of the model",
                "Set a smaller max_gen_toks in the generation_kwargs of your own YAML",
            )


def _manager(names: Sequence[str], folder: Path | None) -> TaskManager:
    """Return an index with all names; the harness's is slow, so it is only read if needed.

    Raises:
        SavedError: a name is unknown.
    """
    own = TaskManager(include_defaults=False, include_path=folder and str(folder))
    if set(names) <= set(own.all_subtasks):
        return own
    everything = TaskManager(include_path=folder and str(folder))
    for name in names:
        if name not in everything.task_index:
            near = difflib.get_close_matches(name, [HELD_OUT, *everything.all_tasks], 3)
            raise SavedError(
                f"Unknown task '{name}'" + _unreadable(folder),
                f"a name such as {', '.join(near or [HELD_OUT])}",
                "`lm-eval ls tasks` lists the tasks of lm-evaluation-harness",
            )
    return everything


def _unreadable(folder: Path | None) -> str:
    """Return a clause on the first invalid YAML file in a folder, which an index ignores."""
    for path in sorted(folder.rglob("*.yaml")) if folder else ():
        try:
            load_yaml(path, resolve_func=False)
        except Exception as error:  # in the file, or in one that it includes
            return f", and {path} cannot be read: {_words(error)}"
    return ""


def _held_out(documents: Iterable[str]) -> ConfigurableTask:
    rows = Dataset.from_list([{"text": text} for text in documents if text])
    if not len(rows):
        raise SavedError(f"The text for {HELD_OUT} is empty", "at least one document")
    return ConfigurableTask(
        config=load_yaml(YAML) | {"custom_dataset": lambda **rest: {"documents": rows}}
    )


def _refusal(name: str, error: Exception) -> SavedError:
    """Return the error for a task that could not be loaded: missing data, or another reason."""
    frames = [
        frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == "download"
    ]
    tasks = [frame.f_locals.get("self") for frame in frames]
    lacking = next((task for task in tasks if isinstance(task, Task)), None)
    if lacking is None or lacking.DATASET_PATH is None:
        return SavedError(f"The task {name} cannot be loaded: {_words(error)}", "a valid YAML task")
    options = dict(getattr(lacking.config, "dataset_kwargs", None) or {})
    if "data_files" in options:
        return SavedError(
            f"The data of the task {name} cannot be read: {_words(error)}",
            "the data_files that its YAML names",
        )
    given = [lacking.DATASET_PATH, *filter(None, [lacking.DATASET_NAME])]
    words = [*map(repr, given), *(f"{key}={value!r}" for key, value in options.items())]
    return SavedError(
        f"The data set {' '.join(given)} of the task {name} is not on this disk: {_words(error)}",
        "data that was fetched before; this program fetches nothing",
        f"""Fetch it: {sys.executable} -c "import datasets; """
        f"""datasets.load_dataset({", ".join(words)})\"""",
    )


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(".: ")
