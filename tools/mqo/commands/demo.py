"""`mqo demo`: train a small model with and without quantization, and compare the runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL, DATASET, TRAINING = "llama32-1b", "wikipedia", "tiny"
MODES, SEEDS = "bf16,FA_linear_mxfp4", (1, 2, 3)
# 200 steps, of which the report needs 100, and a validation at their end.
FLAGS = ("--train-samples", "800", "--eval-interval", "200", "--eval-iters", "16")


def demo(
    folder: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FOLDER", help="The folder of the runs; default: runs/demo."
        ),
    ] = None,
) -> None:
    """Train six small runs, with MXFP4 and without, and compare them: a first look.

    Three seeds each, 200 steps of 256 tokens, a few minutes on two CPU cores. The same command
    again skips the runs that are done. Exit 1 if a run failed twice.
    """
    from mqo.commands.sweep import executor_of, run_jobs
    from mqo.output import folder_of
    from mqo.perf.losses import compare_losses, comparison_lines
    from mqo.project import Project
    from mqo.report.collect import collect
    from mqo.report.compare import compare
    from mqo.report.folder import PAGE, write
    from mqo.sweep import configs
    from mqo.sweep.state import SweepFolder

    planned = configs.jobs(MODEL, DATASET, MODES, TRAINING, seeds=SEEDS, extra_flags=FLAGS)
    configs.check(planned)
    project = Project.here()
    runs = SweepFolder(folder_of(folder or project.runs / "demo"))
    report = runs.root / "report"
    with runs.held():
        executor = executor_of(runs, None, None, processes=1, runs=len(planned), tracker=None)
        ended = run_jobs(project, runs, planned, executor)
    if any(entry.state != "done" for entry in ended):
        raise typer.Exit(1)
    records, left_out = collect([runs.root])
    groups, repeated = compare(records)
    write(groups, left_out + repeated, report)
    print("\n".join(comparison_lines(compare_losses([runs.root]))))
    print(f"page     : {report / PAGE}")
    print(f"again    : mqo compare {runs.root}")
