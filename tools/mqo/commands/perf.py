"""`mqo perf`: test the performance of a mode, or compare two results."""

from pathlib import Path
from typing import Annotated

import typer

from mqo.commands.options import (
    AxisOption,
    FlagsArgument,
    GemmsOption,
    RecipesOption,
    TrainingOption,
)

NoScaling = Annotated[
    bool, typer.Option("--no-scaling", help="Do not compare one process with two.")
]
Folder = Annotated[
    Path | None,
    typer.Option("-o", "--out", metavar="FOLDER", help="A new folder; by default below runs/perf."),
]
Compared = Annotated[
    tuple[Path, Path] | None,
    typer.Option(metavar="A B", help="Only compare step times of two such folders or runs."),
]
Repeats = Annotated[int, typer.Option(min=0, help="With --compare: replay A and B N times each.")]
AllowVersions = Annotated[
    bool,
    typer.Option("--allow-versions", help="With --compare: allow other versions or machines."),
]


def perf(
    model: Annotated[str | None, typer.Option(help="A model.")] = None,
    mode: Annotated[str | None, typer.Option(help="The mode to test, or modes.")] = None,
    recipes: RecipesOption = "",
    axis: AxisOption = None,
    baseline: Annotated[str, typer.Option(help="The mode to compare with.")] = "bf16",
    dataset: Annotated[str, typer.Option(help="A dataset.")] = "wikipedia",
    training_config: TrainingOption = "smoke",
    gemms: GemmsOption = "fprop",
    no_scaling: NoScaling = False,
    folder: Folder = None,
    compare: Compared = None,
    repeats: Repeats = 0,
    allow_versions: AllowVersions = False,
    flags: FlagsArgument = None,
) -> None:
    """Test a mode's precision, loss, determinism, speed and memory, and judge them on one page.

    Trains the baseline and, twice, the mode; then 12 steps on one process and on two.
    Several modes, recipes or values are tested one after the other, each in a folder of FOLDER.

    FOLDER gets perf.json, index.html, the trace of a few steps, and the runs.

    --compare instead compares two folders or runs: B's step time divided by A's.

    Exit 0 if no verdict fails, 1 if one does, 2 for errors.
    """
    from mqo.errors import MqoError, RunError
    from mqo.launch.variants import variants
    from mqo.matrix import tables
    from mqo.perf import measure
    from mqo.perf.train import PerfOptions
    from mqo.perf.verdicts import tables as limits

    try:
        if compare is not None:
            measure.compare(*compare, repeats=repeats, allow_versions=allow_versions)
            return
        if model is None or not (mode or recipes):
            raise MqoError(
                "--model, or one of --mode and --recipes, is missing",
                expected="--model with --mode or --recipes, or --compare A B",
            )
        choice = tables.check_gemms(gemms)
        (base,) = variants(tables.pick(tables.modes(), "quantization mode", baseline).name)
        chosen = variants(mode or "", recipes, axis or ())
        rest = (base, dataset, training_config, choice, tuple(flags or ()), limits().steps)
        tests = [PerfOptions(model, variant, *rest) for variant in chosen]
        failed = measure.run_tests(tests, folder, scaling=not no_scaling)
    except RunError as error:
        error.exit_code = MqoError.exit_code  # 1 would say that a verdict failed
        raise
    raise typer.Exit(1 if failed else 0)
