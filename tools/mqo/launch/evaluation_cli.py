"""`mqo eval` and `mqo generate`: what a saved model loses on a text, and what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mqo.display import stderr
from mqo.errors import CheckpointError
from mqo.overlay.cli import TreeOption, settled
from mqo.terminal import JsonOption, emit
from mqo.untrusted import read_text, reading

_PLACE = "A run, a folder of checkpoints, or of one iteration."
TokenizerOption = Annotated[
    Path | None, typer.Option(help="A tokenizer folder; by default the training's.")
]
IgnoreOption = Annotated[
    list[str] | None,
    typer.Option(
        "--ignore-argument",
        metavar="NAME",
        help="An argument of the checkpoint that Megatron does not know; repeatable.",
    ),
]
Modes = Annotated[
    str | None, typer.Option(help="Modes and globs with commas between; by default the run's own.")
]
Data = Annotated[
    list[Path] | None, typer.Option(help="An indexed dataset, read as a whole; repeatable.")
]
Tasks = Annotated[
    str | None,
    typer.Option(help="Tasks of lm-evaluation-harness in the loss's place, with commas."),
]
TasksFolder = Annotated[
    Path | None, typer.Option(help="YAML of further tasks, which may run code of its folder.")
]
Limit = Annotated[int | None, typer.Option(min=1, help="Documents a task, at most.")]
Fewshot = Annotated[
    int | None, typer.Option(min=0, help="Examples before a question, where a task has any.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command(name="eval")(evaluate)
    app.command()(generate)


def evaluate(
    checkpoints: Annotated[list[Path], typer.Argument(metavar="CHECKPOINT...", help=_PLACE)],
    modes: Modes = None,
    data: Data = None,
    text: Annotated[Path | None, typer.Option(help="A file of plain text.")] = None,
    tokenizer: TokenizerOption = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to read, at most.")] = None,
    tasks: Tasks = None,
    tasks_folder: TasksFolder = None,
    limit: Limit = None,
    num_fewshot: Fewshot = None,
    ignore_argument: IgnoreOption = None,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Measure the loss of checkpoints on held-out text, or tasks, under any training mode."""
    from mqo.launch import evaluation
    from mqo.launch import tasks as harness
    from mqo.launch.evaluation import AS_TRAINED, Place
    from mqo.matrix import tables

    names = tables.expand_modes(modes) if modes else [AS_TRAINED]
    places = [Place.of(path) for path in checkpoints]
    if tasks is not None:
        words = evaluation.ignoring(ignore_argument or ()) + harness.options(
            tasks,
            evaluation.text(data or (), text, tokens=tokens),
            folder=tasks_folder,
            tokenizer=tokenizer,
            limit=limit,
            shots=num_fewshot,
        )
        scores = harness.evaluate(settled(tree), places, names, words, stderr())
        rows = [vars(score) for score in scores]
        emit("eval", None, "\n".join(harness.lines(scores)), as_json, tasks=rows)
        return
    if tasks_folder or limit or num_fewshot is not None:
        raise CheckpointError(
            "--tasks-folder, --limit and --num-fewshot are of tasks", expected="--tasks beside them"
        )
    words = evaluation.text(data or (), text, tokenizer, tokens)
    words += evaluation.ignoring(ignore_argument or ())
    found = evaluation.evaluate(settled(tree), places, names, words, stderr())
    rows = [loss.as_table() for loss in found]
    emit("eval", None, "\n".join(evaluation.lines(found)), as_json, losses=rows)


def generate(
    checkpoint: Annotated[Path, typer.Argument(help=_PLACE)],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeatable.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file with one prompt per line.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate, at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the most likely token.")] = 0.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Most likely tokens to sample from; 0: all.")
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Share of the probability to sample from."),
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the sampling.")] = 0,
    mode: Annotated[str | None, typer.Option(help="A mode; by default the run's own.")] = None,
    tokenizer: TokenizerOption = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Recompute the whole text for each token.")
    ] = False,
    ignore_argument: IgnoreOption = None,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Generate text from prompts with a checkpoint."""
    from mqo.launch import evaluation
    from mqo.launch.evaluation import AS_TRAINED, Place

    given = [*(prompt or ()), *(_lines(prompts) if prompts else ())]
    if not given:
        raise CheckpointError("There is no prompt", expected="--prompt TEXT, or --prompts FILE")
    drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    words = evaluation.sampling(tokens=tokens, cache=not no_cache, **drawn)
    words += evaluation.ignoring(ignore_argument or ())
    place, mode = Place.of(checkpoint), mode or AS_TRAINED
    found = evaluation.generate(settled(tree), place, mode, given, words, tokenizer)
    written = "\n\n".join(row["prompt"] + row["text"] for row in found["texts"])
    emit("generate", None, written, as_json, **found)


def _lines(file: Path) -> list[str]:
    with reading(CheckpointError):
        text = read_text(file)
    return [line for line in text.splitlines() if line.strip()]
