"""`mqo eval`: measure the loss of a saved model on text, or its scores on tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mqo.commands.options import (
    CHECKPOINTS,
    FormatsOption,
    IgnoreOption,
    JsonOption,
    PluginOption,
    PluginOptionOption,
    TokenizerOption,
    TreeOption,
    joined,
    settled,
)
from mqo.display import stderr
from mqo.errors import CheckpointError
from mqo.terminal import emit

Modes = Annotated[
    list[str] | None,
    typer.Option(
        "--mode",
        metavar="NAME,...",
        help="Modes and globs; by default the run's mode; repeatable.",
    ),
]
Data = Annotated[
    list[Path] | None, typer.Option(help="An indexed dataset, read completely; repeatable.")
]
Tasks = Annotated[
    str | None,
    typer.Option(help="Comma-separated tasks of lm-evaluation-harness, instead of the loss."),
]
TasksFolder = Annotated[
    Path | None,
    typer.Option(help="A folder of YAML files with more tasks, which may run its code."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Maximum number of documents per task.")]
Fewshot = Annotated[
    int | None, typer.Option(min=0, help="Examples before each question, if the task has any.")
]


def evaluate(
    checkpoints: Annotated[list[Path], typer.Argument(metavar="CHECKPOINT...", help=CHECKPOINTS)],
    modes: Modes = None,
    data: Data = None,
    text: Annotated[Path | None, typer.Option(help="A file of plain text.")] = None,
    tokenizer: TokenizerOption = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens to read.")] = None,
    tasks: Tasks = None,
    tasks_folder: TasksFolder = None,
    limit: Limit = None,
    num_fewshot: Fewshot = None,
    formats: FormatsOption = None,
    plugin: PluginOption = None,
    plugin_option: PluginOptionOption = None,
    ignore_argument: IgnoreOption = None,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Measure the loss of checkpoints on held-out text, or tasks, under any training mode."""
    from mqo.launch import evaluation
    from mqo.launch import tasks as harness
    from mqo.launch.forward_pass import AS_TRAINED, SavedModel
    from mqo.launch.own_types import OwnTypes
    from mqo.matrix import tables

    own = OwnTypes.from_options(formats, plugin, plugin_option)  # before names are checked
    given = joined(modes)
    names = tables.expand_modes(given) if given else [AS_TRAINED]
    sources = [SavedModel.find(path) for path in checkpoints]
    ignored = {"ignored": ignore_argument or []}
    if tasks is not None:
        request = ignored | harness.options(
            tasks,
            evaluation.text(data or (), text, tokens=tokens),
            folder=tasks_folder,
            tokenizer=tokenizer,
            limit=limit,
            shots=num_fewshot,
        )
        scores = harness.evaluate(settled(tree), sources, names, request, stderr(), own)
        rows = [vars(score) for score in scores]
        emit("eval", None, "\n".join(harness.score_lines(scores)), as_json, tasks=rows)
        return
    if tasks_folder or limit or num_fewshot is not None:
        raise CheckpointError(
            "--tasks-folder, --limit and --num-fewshot need --tasks", expected="--tasks with them"
        )
    request = ignored | evaluation.text(data or (), text, tokenizer, tokens)
    losses = evaluation.evaluate(settled(tree), sources, names, request, stderr(), own)
    rows = [loss.as_table() for loss in losses]
    emit("eval", None, "\n".join(evaluation.loss_lines(losses)), as_json, losses=rows)
