"""Finds tasks by name, with their data: those of the harness, of a folder, and of this project."""

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
GENERATED = 256  # tokens of an answer, where a task does not say


def load(
    names: Sequence[str], folder: Path | None, documents: Callable[[], Iterable[str]]
) -> dict[str, dict[str, Any]]:
    """Make the tasks, of the names in the harness and in a folder of YAML; `documents` are ours.

    Returns what the harness's `evaluate` takes: {"tasks", "groups", "group_map"}.

    Raises:
        SavedError: there is no such task, it cannot be made, or its data is not on this disk.
    """
    # As the harness's own command does: some tasks shuffle.
    random.seed(defaults.DEFAULT_RANDOM_SEED)
    np.random.seed(defaults.DEFAULT_OTHER_SEED)
    torch.manual_seed(defaults.DEFAULT_OTHER_SEED)
    manager = _manager([name for name in names if name != HELD_OUT], folder)
    made: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}, "group_map": {}}
    for name in names:
        try:
            found = manager.load([_held_out(documents()) if name == HELD_OUT else name])
        except SavedError:
            raise
        except Exception as error:  # whatever the code that a YAML names raises
            raise _refusal(name, error) from error
        for kind, rows in found.items():
            made[kind] |= rows
    return made


def check(tasks: Iterable[Any], length: int) -> None:
    """Raise SavedError if a task needs more than a text model with `length` tokens."""
    for task in tasks:
        name = task.task_name
        if getattr(task, "UNSAFE_CODE", False):
            raise SavedError(
                f"The task {name} runs code that the model writes", "one that does not"
            )
        if getattr(task, "MULTIMODAL", False):
            raise SavedError(f"The task {name} has pictures or sounds", "one of text")
        if task.OUTPUT_TYPE != "generate_until":
            continue
        asked = normalize_gen_kwargs(task.config.generation_kwargs or {}, GENERATED)
        if asked.get("do_sample"):
            raise SavedError(f"The task {name} draws its answers", "one that takes the likeliest")
        if asked["max_gen_toks"] >= length:
            raise SavedError(
                f"An answer of the task {name} has up to {asked['max_gen_toks']} tokens",
                f"fewer than {length}, the window of the model",
                "Set max_gen_toks in the generation_kwargs of a YAML of your own",
            )


def _manager(names: Sequence[str], folder: Path | None) -> TaskManager:
    """Return an index that has the names; that of the harness takes long, and is read if need be.

    Raises:
        SavedError: no index has a name.
    """
    own = TaskManager(include_defaults=False, include_path=folder and str(folder))
    if set(names) <= set(own.all_subtasks):
        return own
    everything = TaskManager(include_path=folder and str(folder))
    for name in names:
        if name not in everything.task_index:
            near = difflib.get_close_matches(name, [HELD_OUT, *everything.all_tasks], 3)
            raise SavedError(
                f"There is no task called '{name}'" + _unreadable(folder),
                f"a name such as {', '.join(near or [HELD_OUT])}",
                "`lm-eval ls tasks` lists those of lm-evaluation-harness",
            )
    return everything


def _unreadable(folder: Path | None) -> str:
    """Return a clause on the YAML files in a folder that are none, which an index passes over."""
    for path in sorted(folder.rglob("*.yaml")) if folder else ():
        try:
            load_yaml(path, resolve_func=False)
        except Exception as error:  # of the file, or of one that it includes
            return f", and {path} cannot be read: {_words(error)}"
    return ""


def _held_out(documents: Iterable[str]) -> ConfigurableTask:
    rows = Dataset.from_list([{"text": text} for text in documents if text])
    if not len(rows):
        raise SavedError(f"There is no document for {HELD_OUT}", "a text of one at least")
    return ConfigurableTask(
        config=load_yaml(YAML) | {"custom_dataset": lambda **rest: {"documents": rows}}
    )


def _refusal(name: str, error: Exception) -> SavedError:
    """Return what to say of a task that could not be made: that its data is missing, or why."""
    frames = [
        frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == "download"
    ]
    tasks = [frame.f_locals.get("self") for frame in frames]
    lacking = next((task for task in tasks if isinstance(task, Task)), None)
    if lacking is None or lacking.DATASET_PATH is None:
        return SavedError(f"The task {name} cannot be made: {_words(error)}", "YAML of the harness")
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
        "data that was fetched before, as nothing is fetched here",
        f"""Fetch it: {sys.executable} -c "import datasets; """
        f"""datasets.load_dataset({", ".join(words)})\"""",
    )


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}".rstrip(".: ")
