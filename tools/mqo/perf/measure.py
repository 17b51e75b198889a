"""A performance test from its runs to its folder, and two of them side by side."""

import datetime
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from mqo.display import Display
from mqo.errors import MqoError, RunError
from mqo.launch.folder import create
from mqo.launch.machine import detect
from mqo.launch.rerun import rerun
from mqo.perf.comparability import RECORD, Timed, check_comparable, read, run_of, timed
from mqo.perf.page import page, shown
from mqo.perf.ratio import lines as compared
from mqo.perf.ratio import ratio
from mqo.perf.sections import TRACE, Measured, Section, outcomes, sections
from mqo.perf.train import Asked, Plan, plan, train
from mqo.project import Project
from mqo.report.collect import Run
from mqo.runs import RunFolder, replace_text
from mqo.terminal import jsonable


def run_tests(asked: Sequence[Asked], folder: Path | None, *, scaling: bool) -> bool:
    """Test each way to quantize, several in folders of their own; return whether a verdict failed.

    All are checked before any is trained.
    """
    project, machine = Project.here(), detect()
    plans = [plan(one, machine, scaling=scaling) for one in asked]
    place = _new(project, plans[0], folder)
    failed = []
    for one, planned in zip(asked, plans, strict=True):
        within = place if len(asked) == 1 else place / one.mode.name
        within.mkdir(exist_ok=True)
        failed.append(_run_test(project, one, planned, within))
    return any(failed)


def _run_test(project: Project, asked: Asked, planned: Plan, place: Path) -> bool:
    """Measure, write the folder, and print the verdicts; return whether one failed."""
    runs = train(project, planned.runs, place / "runs", Display.on(sys.stdout))
    _keep_trace(place)
    measured = Measured(planned, runs, place)
    made = sections(measured)
    write(asked, measured, made)
    for line in lines(made):
        print(line)
    print(str(place / "index.html"))
    return any(verdict.outcome == "fail" for verdict in outcomes(made))


def _new(project: Project, planned: Plan, folder: Path | None) -> Path:
    """Return the folder, empty; MqoError for one that holds something."""
    if folder is None:
        return create(project.runs / "perf", planned.mode.config.title).root
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise MqoError(f"{folder} holds something already", expected="a new or an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _keep_trace(place: Path) -> None:
    """Move the profiler's trace out of the run; RunError where it wrote none."""
    found = sorted((place / "runs" / "again" / "torch_profile").glob("*.json.gz"))
    if not found:
        raise RunError(
            "torch's profiler wrote no trace",
            expected=f"a file in {place / 'runs' / 'again' / 'torch_profile'}",
        )
    found[0].replace(place / TRACE)


def write(asked: Asked, measured: Measured, made: Sequence[Section]) -> None:
    """Write index.html, and at last perf.json, each of them whole."""
    runs = measured.runs
    facts = {
        "schema": 1,
        "when": datetime.datetime.now().isoformat(sep=" ", timespec="minutes"),
        "asked": asked.facts,
        "timed": asdict(timed(runs["mode"], runs["again"])),
        "sections": [asdict(section) for section in made],
    }
    text = json.dumps(jsonable(facts), indent=1, allow_nan=False)
    for name, content in (("index.html", page(facts, made, runs)), (RECORD, text + "\n")):
        replace_text(measured.place / name, content)


def lines(made: Sequence[Section]) -> list[str]:
    """Return the verdicts in at most 80 columns, with the reason of each that is not a pass."""
    text = []
    for section in made:
        for one in section.verdicts:
            value = shown(one.value)
            text.append(f"{one.outcome:10} {one.what[:37]:37} {value:>9} {one.bound[:21]}".rstrip())
            if one.outcome != "pass":
                indent = " " * 11
                text += textwrap.wrap(one.why, 80, initial_indent=indent, subsequent_indent=indent)
    return text


def compare(one: Path, other: Path, *, repeats: int, allow_versions: bool) -> None:
    """Print the step times of two folders side by side, after `repeats` replays of both."""
    sides = read(one), read(other)
    check_comparable(*sides, allow_versions=allow_versions)
    if repeats:
        sides = _replayed(one, other, repeats, allow_versions=allow_versions)
    for line in compared(*sides, ratio(*sides)):
        print(line)


def _replayed(one: Path, other: Path, repeats: int, *, allow_versions: bool) -> tuple[Timed, Timed]:
    """Replay both, in turn: what slows the machine for a while then slows both."""
    project, say = Project.here(), Display.on(sys.stdout)
    done: tuple[list[Run], list[Run]] = ([], [])
    for n in range(1, repeats + 1):
        for side, runs in zip((one, other), done, strict=True):
            say(f"repeat {n}/{repeats}: {side}")
            run = side / "runs" / "mode" if (side / RECORD).is_file() else side
            found = rerun(project, RunFolder(run), allow_versions=allow_versions, report=say)
            runs.append(run_of(Path(found.run)))
    return timed(*done[0]), timed(*done[1])
