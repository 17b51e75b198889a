"""`mqo perf`: a mode's performance test, or two results of it side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mqo.perf.alike import Timed
    from mqo.perf.sections import Measured, Section
    from mqo.perf.train import Asked, Plan
    from mqo.project import Project
    from mqo.report.collect import Run


def perf(
    model: Annotated[str | None, typer.Option(help="A model of the matrix.")] = None,
    mode: Annotated[str | None, typer.Option(help="The mode that is tested.")] = None,
    baseline: Annotated[str, typer.Option(help="The mode that it is compared with.")] = "bf16",
    dataset: Annotated[str, typer.Option(help="A dataset.")] = "wikipedia",
    training_config: Annotated[str, typer.Option(help="Sizes and schedule.")] = "smoke",
    gemms: Annotated[str, typer.Option(help="fprop; or all: dgrad and wgrad, too.")] = "fprop",
    no_scaling: Annotated[
        bool, typer.Option("--no-scaling", help="Leave out one process against two.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FOLDER", help="A new one; by default one below runs/perf."
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Instead: step times of two such folders, or two runs."),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=0, help="With --compare: replay both so often, in turn.")
    ] = 0,
    allow_versions: Annotated[
        bool,
        typer.Option("--allow-versions", help="With --compare: other versions or machines, too."),
    ] = False,
    flags: Annotated[list[str] | None, typer.Argument(help="Behind `--`: Megatron's own.")] = None,
) -> None:
    """Test a mode's precision, loss, determinism, speed and memory, and judge them on one page.

    Trains the baseline and, twice, the mode; then 12 steps on one process and on two.

    FOLDER gets perf.json, index.html, the trace of a few steps, and the runs.

    --compare instead puts two folders, or two runs, side by side: B's step time over A's.

    Exit 0 if no verdict fails, 1 if one does, 2 for errors.
    """
    from mqo.errors import MqoError, RunError
    from mqo.matrix import tables

    try:
        if compare is not None:
            _compare(*compare, repeats=repeats, allow_versions=allow_versions)
            return
        if model is None or mode is None:
            raise MqoError("--model and --mode are missing", expected="both, or --compare A B")
        tables.check_choice("choice of GEMMs", gemms, tuple(tables.LINEAR_SITES))
        from mqo.perf.train import Asked
        from mqo.perf.verdicts import tables as limits

        names = (model, mode, baseline, dataset, training_config)
        asked = Asked(*names, gemms, tuple(flags or ()), limits().steps)  # type: ignore[arg-type]
        failed = _test(asked, folder, scaling=not no_scaling)
    except RunError as error:
        error.exit_code = MqoError.exit_code  # 1 would say that a verdict failed
        raise
    raise typer.Exit(1 if failed else 0)


def _test(asked: Asked, folder: Path | None, *, scaling: bool) -> bool:
    """Measure, write the folder, and print the verdicts; whether one failed."""
    import sys

    from mqo.display import Display
    from mqo.launch.machine import detect
    from mqo.perf.sections import Measured, outcomes, sections
    from mqo.perf.train import plan, train
    from mqo.project import Project

    project = Project.here()
    planned = plan(asked, detect(), scaling=scaling)
    place = _new(project, planned, folder)
    runs = train(project, planned.runs, place / "runs", Display.on(sys.stdout))
    _keep_trace(place)
    measured = Measured(planned, runs, place)
    made = sections(measured)
    write(asked, measured, made)
    for line in lines(made):
        _say(line)
    _say(str(place / "index.html"))
    return any(verdict.outcome == "fail" for verdict in outcomes(made))


def _new(project: Project, planned: Plan, folder: Path | None) -> Path:
    """The folder, empty; MqoError for one that holds something."""
    from mqo.errors import MqoError
    from mqo.launch.folder import create

    if folder is None:
        return create(project.runs / "perf", planned.mode.config.title).root
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise MqoError(f"{folder} holds something already", expected="a new or an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _keep_trace(place: Path) -> None:
    """Move the profiler's trace out of the run; RunError where it wrote none."""
    from mqo.errors import RunError
    from mqo.perf.sections import TRACE

    found = sorted((place / "runs" / "again" / "torch_profile").glob("*.json.gz"))
    if not found:
        raise RunError(
            "torch's profiler wrote no trace",
            expected=f"a file in {place / 'runs' / 'again' / 'torch_profile'}",
        )
    found[0].replace(place / TRACE)


def write(asked: Asked, measured: Measured, made: Sequence[Section]) -> None:
    """index.html, and at last perf.json, each of them whole."""
    import datetime
    import json
    from dataclasses import asdict

    from mqo.perf.alike import RECORD, timed
    from mqo.perf.page import page
    from mqo.report.tables import plain

    runs = measured.runs
    facts = {
        "schema": 1,
        "when": datetime.datetime.now().isoformat(sep=" ", timespec="minutes"),
        "asked": asdict(asked),
        "timed": timed(runs["mode"], runs["again"]).as_table(),
        "sections": [asdict(section) for section in made],
    }
    text = json.dumps(plain(facts), indent=1, allow_nan=False)
    for name, content in (("index.html", page(facts, made, runs)), (RECORD, text + "\n")):
        partial = measured.place / f".{name}.partial"
        partial.write_text(content, encoding="utf-8")
        partial.replace(measured.place / name)


def lines(made: Sequence[Section]) -> list[str]:
    """The verdicts, 80 columns wide or less, with the reason of each that is no pass."""
    import textwrap

    from mqo.perf.page import shown

    text = []
    for section in made:
        for one in section.verdicts:
            value = shown(one.value)
            text.append(f"{one.outcome:10} {one.what[:37]:37} {value:>9} {one.bound[:21]}".rstrip())
            if one.outcome != "pass":
                indent = " " * 11
                text += textwrap.wrap(one.why, 80, initial_indent=indent, subsequent_indent=indent)
    return text


def _compare(one: Path, other: Path, *, repeats: int, allow_versions: bool) -> None:
    from mqo.perf.alike import check_alike, read
    from mqo.perf.ratio import lines as compared
    from mqo.perf.ratio import ratio

    sides = read(one), read(other)
    check_alike(*sides, allow_versions=allow_versions)
    if repeats:
        sides = _replayed(one, other, repeats, allow_versions=allow_versions)
    for line in compared(*sides, ratio(*sides)):
        typer.echo(line)


def _replayed(one: Path, other: Path, repeats: int, *, allow_versions: bool) -> tuple[Timed, Timed]:
    """Both runs again, in turn: what slows the machine for a while then slows both."""
    import sys

    from mqo.display import Display
    from mqo.launch.rerun import rerun
    from mqo.perf.alike import RECORD, run_of, timed
    from mqo.project import Project
    from mqo.runs import RunFolder

    project, say = Project.here(), Display.on(sys.stdout)
    done: tuple[list[Run], list[Run]] = ([], [])
    for n in range(1, repeats + 1):
        for side, runs in zip((one, other), done, strict=True):
            say(f"repeat {n}/{repeats}: {side}")
            run = side / "runs" / "mode" if (side / RECORD).is_file() else side
            found = rerun(project, RunFolder(run), allow_versions=allow_versions, report=say)
            runs.append(run_of(Path(found.run)))
    return timed(*done[0]), timed(*done[1])


def _say(text: str) -> None:
    typer.echo(text)
