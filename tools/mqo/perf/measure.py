"""Run performance tests, write their folders, and compare two of them."""

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
from mqo.megatron.run.files import jsonable
from mqo.perf.comparability import RECORD, Timed, check_comparable, read, run_of, timed
from mqo.perf.page import page, shown
from mqo.perf.ratio import ratio, ratio_lines
from mqo.perf.sections import TRACE, Measured, Section, outcomes, sections
from mqo.perf.train import PerfOptions, PerfPlan, plan, train
from mqo.project import Project
from mqo.report.collect import Run
from mqo.runs import RunFolder, replace_text


def run_tests(tests: Sequence[PerfOptions], folder: Path | None, *, scaling: bool) -> bool:
    """Run each test, several in separate folders; return whether a verdict failed.

    All tests are checked before the first training.
    """
    project, machine = Project.here(), detect()
    plans = [plan(options, machine, scaling=scaling) for options in tests]
    root = _new(project, plans[0], folder)
    failed = []
    for options, planned in zip(tests, plans, strict=True):
        within = root if len(tests) == 1 else root / options.mode.name
        within.mkdir(exist_ok=True)
        failed.append(_run_test(project, options, planned, within))
    return any(failed)


def _run_test(project: Project, options: PerfOptions, planned: PerfPlan, folder: Path) -> bool:
    """Run one test, write its folder, and print the verdicts; return whether one failed."""
    runs = train(project, planned.runs, folder / "runs", Display.on(sys.stdout))
    _keep_trace(folder)
    measured = Measured(planned, runs, folder)
    evaluated = sections(measured)
    write(options, measured, evaluated)
    for line in verdict_lines(evaluated):
        print(line)
    print(str(folder / "index.html"))
    return any(verdict.outcome == "fail" for verdict in outcomes(evaluated))


def _new(project: Project, planned: PerfPlan, folder: Path | None) -> Path:
    """Return a new or empty folder; MqoError for one that is not empty."""
    if folder is None:
        return create(project.runs / "perf", planned.mode.config.title).root
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise MqoError(f"{folder} is not empty", expected="a new or an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _keep_trace(folder: Path) -> None:
    """Move the profiler's trace out of the run; RunError if there is none."""
    traces = sorted((folder / "runs" / "again" / "torch_profile").glob("*.json.gz"))
    if not traces:
        raise RunError(
            "torch's profiler wrote no trace",
            expected=f"a file in {folder / 'runs' / 'again' / 'torch_profile'}",
        )
    traces[0].replace(folder / TRACE)


def write(options: PerfOptions, measured: Measured, evaluated: Sequence[Section]) -> None:
    """Write index.html, then perf.json; each file is replaced as a whole."""
    runs = measured.runs
    facts = {
        "schema": 1,
        "when": datetime.datetime.now().isoformat(sep=" ", timespec="minutes"),
        "asked": options.facts,
        "timed": asdict(timed(runs["mode"], runs["again"])),
        "sections": [asdict(section) for section in evaluated],
    }
    text = json.dumps(jsonable(facts), indent=1, allow_nan=False)
    for name, content in (("index.html", page(facts, evaluated, runs)), (RECORD, text + "\n")):
        replace_text(measured.folder / name, content)


def verdict_lines(evaluated: Sequence[Section]) -> list[str]:
    """Return the verdicts in at most 80 columns, with reasons for all but passes."""
    text = []
    for verdict in outcomes(evaluated):
        name, bound = verdict.what[:37], verdict.bound[:21]
        text.append(f"{verdict.outcome:10} {name:37} {shown(verdict.value):>9} {bound}".rstrip())
        if verdict.outcome != "pass":
            indent = " " * 11
            text += textwrap.wrap(verdict.why, 80, initial_indent=indent, subsequent_indent=indent)
    return text


def compare(first: Path, second: Path, *, repeats: int, allow_versions: bool) -> None:
    """Print the step times of two folders, after `repeats` replays of both."""
    sides = read(first), read(second)
    check_comparable(*sides, allow_versions=allow_versions)
    if repeats:
        sides = _replayed(first, second, repeats, allow_versions=allow_versions)
    for line in ratio_lines(*sides, ratio(*sides)):
        print(line)


def _replayed(
    first: Path, second: Path, repeats: int, *, allow_versions: bool
) -> tuple[Timed, Timed]:
    """Replay both in turn, so that a slow phase of the machine affects both."""
    project, say = Project.here(), Display.on(sys.stdout)
    done: tuple[list[Run], list[Run]] = ([], [])
    for n in range(1, repeats + 1):
        for side, runs in zip((first, second), done, strict=True):
            say(f"repeat {n}/{repeats}: {side}")
            run = side / "runs" / "mode" if (side / RECORD).is_file() else side
            result = rerun(project, RunFolder(run), allow_versions=allow_versions, report=say)
            runs.append(run_of(Path(result.run)))
    return timed(*done[0]), timed(*done[1])
