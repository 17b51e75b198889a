"""`mqo sweep`: train many runs, and print a summary."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer

from mqo.commands.options import (
    OWN_MODEL,
    AttentionGemmsOption,
    AxisOption,
    ExcludeOption,
    FlagsArgument,
    FormatsOption,
    GemmsOption,
    IncludeOption,
    ModelClassOption,
    PluginOption,
    PluginOptionOption,
    RecipesOption,
    ShrinkOption,
    StrictOption,
    TextOption,
    TrainingOption,
    joined,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mqo.project import Project
    from mqo.sweep.configs import Job
    from mqo.sweep.local import Local
    from mqo.sweep.slurm import Slurm
    from mqo.sweep.state import Entry, SweepFolder

_NAMES = "NAME,..."
_LIST = "names with commas, globs, or 'all'; repeatable"
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model", metavar=_NAMES, help=f"Models: {_LIST}; by default all. Also {OWN_MODEL[3:]}."
    ),
]
Datasets = Annotated[
    list[str] | None,
    typer.Option(
        "--dataset",
        metavar=_NAMES,
        help=f"Datasets: {_LIST}; by default all, or the name of your data.",
    ),
]
Modes = Annotated[
    list[str] | None,
    typer.Option(
        "--mode", metavar=_NAMES, help=f"Modes: {_LIST}; by default those that have scripts."
    ),
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs at a time; by default all that fit.")]
Seeds = Annotated[
    list[str] | None,
    typer.Option("--seed", metavar="N,...", help="Seeds, one run each; repeatable."),
]
Processes = Annotated[int, typer.Option(min=1, help="Processes per job.")]
SlurmOptions = Annotated[
    str | None, typer.Option(metavar="KEY=VALUE,...", help="Submit jobs with these options.")
]
Tracker = Annotated[str | None, typer.Option(help="Send the runs to wandb or mlflow, as a group.")]
Folder = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--out",
        metavar="FOLDER",
        help="The sweep's folder; by default below runs/sweeps, named for its runs.",
    ),
]


def sweep(
    models: Models = None,
    datasets: Datasets = None,
    modes: Modes = None,
    recipes: RecipesOption = None,
    axis: AxisOption = None,
    formats: FormatsOption = None,
    plugin: PluginOption = None,
    plugin_option: PluginOptionOption = None,
    training_config: TrainingOption = "tiny",
    shrink: ShrinkOption = None,
    model_class: ModelClassOption = None,
    jobs: Jobs = None,
    seeds: Seeds = None,
    gemms: GemmsOption = "fprop",
    attention_gemms: AttentionGemmsOption = "forward",
    exclude: ExcludeOption = None,
    include: IncludeOption = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A tokenizer folder.")] = None,
    data_prefix: Annotated[Path | None, typer.Option(help="An index, for one dataset.")] = None,
    text: TextOption = None,
    strict: StrictOption = False,
    nproc_per_node: Processes = 1,
    slurm: SlurmOptions = None,
    tracker: Tracker = None,
    folder: Folder = None,
    flags: FlagsArgument = None,
) -> None:
    """Train many runs side by side; the same command again continues where this one ended.

    Exit 1 if a run failed twice; the others still run.
    """
    from mqo.launch import own_data
    from mqo.launch.config import Cluster
    from mqo.launch.hybrid import check_class
    from mqo.launch.models import shrink_of
    from mqo.launch.own_types import OwnTypes
    from mqo.launch.variants import GemmChoice
    from mqo.matrix import tables
    from mqo.output import folder_of
    from mqo.project import Project
    from mqo.sweep import configs
    from mqo.sweep.state import SweepFolder
    from mqo.track.session import check as check_tracker

    if tracker is not None:
        check_tracker(tracker)
    project, extra = Project.here(), tuple(flags or ())
    tokens, prefix = tokenizer and tokenizer.resolve(), data_prefix and data_prefix.resolve()
    data = own_data.of_options(project, text or (), tokens, prefix, extra, strict=strict)
    own = OwnTypes.from_options(formats, plugin, plugin_option)  # before names are checked
    planned = configs.jobs(
        joined(models) or tables.ALL,
        joined(datasets),
        joined(modes),
        training_config,
        recipes=joined(recipes) or "",
        axes=tuple(axis or ()),
        own=own,
        seeds=_seeds(joined(seeds) or ""),
        extra_flags=extra,
        shrink=shrink_of(shrink),
        model_class=check_class(model_class),
        gemms=GemmChoice.of_names(gemms, attention_gemms),
        exclude=tuple(exclude or ()),
        include=tuple(include or ()),
        dtype=tables.check_dtype(dtype),
        **data.fields,
        cluster=Cluster(nproc_per_node=nproc_per_node),
    )
    configs.check(planned)
    sweep_folder = SweepFolder(folder_of(folder or default_folder(project, planned)))
    with sweep_folder.held():
        executor = executor_of(sweep_folder, slurm, jobs, nproc_per_node, len(planned), tracker)
        ended = run_jobs(project, sweep_folder, planned, executor)
    raise typer.Exit(0 if all(entry.state == "done" for entry in ended) else 1)


def default_folder(project: Project, planned: Sequence[Job]) -> Path:
    """Return a folder named for these runs, so that the same command continues in it."""
    import hashlib

    text = "\n".join(f"{job.name} {job.digest}" for job in planned)
    training = planned[0].config.experiment.training
    name = f"{training.name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return project.runs / "sweeps" / name


def _seeds(text: str) -> list[int]:
    from mqo.errors import MqoError

    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not word.isdecimal():
            raise MqoError(f"The seed '{word}' is not an integer", expected="seeds such as 1,2,3")
    return [int(word) for word in words]


def executor_of(
    folder: SweepFolder,
    slurm: str | None,
    jobs: int | None,
    processes: int,
    runs: int,
    tracker: str | None,
) -> Local | Slurm:
    """Return what starts the jobs: this machine, or Slurm with the options in `slurm`."""
    from mqo.launch.machine import detect
    from mqo.sweep.local import Local, shares

    if slurm is None:
        return Local(shares(detect(), jobs, processes, runs), tracker)
    from mqo.sweep.slurm import Slurm, options

    return Slurm(folder, options(slurm), jobs or runs, tracker)


def run_jobs(
    project: Project, folder: SweepFolder, planned: Sequence[Job], executor: Local | Slurm
) -> list[Entry]:
    """Prepare what all runs share, run them, print the summary, and return their entries."""
    from rich.console import Console

    from mqo.sweep.pool import Pool
    from mqo.sweep.table import counts, shown, summary

    console = Console(highlight=False)
    console.print(f"sweep    : {folder.root}", markup=False, soft_wrap=True)
    entries = folder.entries(planned)  # before preparing: it refuses a folder of another sweep
    if any(entries[job.name].state != "done" for job in planned):
        prepare(project, planned)
    labels = {job.name: job.label for job in planned}
    with shown(console, labels) as view:
        pool = Pool(folder, planned, executor, view)
        if pool.skipped:
            view.say(f"{pool.skipped} of {len(planned)} runs are done already and skipped")
        entries = pool.run()
    ended = [entries[job.name] for job in planned]
    console.print(summary(ended, labels))
    for entry in ended:
        if entry.state == "failed":
            text = f"failed   : {entry.name}: {entry.reason}"
            lines = wrap(text, 80, subsequent_indent=" " * 11, break_long_words=False)
            for line in (*lines, f"{'':11}{folder.run_of(entry).root}"):
                console.print(line, markup=False, soft_wrap=True)
    console.print(counts(ended), markup=False)
    return ended


def prepare(project: Project, planned: Sequence[Job]) -> None:
    """Prepare what all runs share, once."""
    from mqo.launch.prepare import ready_data, ready_tree
    from mqo.overlay.series import Series

    ready_tree(project, Series.of_project(project), print, allow_edits=False)
    experiments = [job.config.experiment for job in planned]
    for experiment in {run.dataset.name: run for run in experiments}.values():
        ready_data(project, experiment, print)
