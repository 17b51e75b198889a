"""`mqo report`: runs in, a folder with the page, pictures and tables out."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mqo.process import temporary_folder

if TYPE_CHECKING:
    from mqo.report.compare import Group

PAGE = "index.html"
WIDTH, MOST_OF_LABEL = 80, 27  # columns of a line, and of a mode's name in it


def report(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or folders of them; by default all.")
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to make or replace.")] = Path(
        "report"
    ),
    tolerance: Annotated[
        float,
        typer.Option(min=0, metavar="PERCENT", help="The gap that the verdict puts up with."),
    ] = 0.5,
    latex: Annotated[
        bool, typer.Option("--latex", help="Write each comparison as a LaTeX table, too.")
    ] = False,
) -> None:
    """Compare runs on one page that works offline, with pictures and tables beside it."""
    from mqo.output import target_of
    from mqo.project import Project
    from mqo.report.collect import collect
    from mqo.report.compare import compare

    target_of(out)  # before the runs are read
    found, left_out = collect(runs or [Project.here().runs])
    groups, repeated = compare(found, tolerance / 100)
    left_out += repeated
    write(groups, left_out, out, latex=latex)
    for line in (line for group in groups for line in summary(group)):
        print(line)
    if left_out:
        print(f"left out, with the reason of each: {len(left_out)}")
    print(f"{out / PAGE} ({(out / PAGE).stat().st_size / 2**20:.1f} MiB)")


def summary(group: Group) -> Iterator[str]:
    """Yield a comparison for the terminal, in lines of at most WIDTH columns.

    First what tells it from other comparisons, then each mode's gap, then what the rule chooses.
    """
    from mqo.report.page import shown, unseen

    count, longest = len(group.runs), max(len(row.label) for row in group.rows)
    width = min(longest, MOST_OF_LABEL)
    yield from _wrapped(f"{group.title}: {count} run{'s' * (count > 1)}", "")
    if group.subtitle:
        yield from _wrapped(f"only here: {group.subtitle}")
    yield f"  {'':{width}}  seeds    loss  gap to unquantized [95 % interval]"
    for row in group.rows:
        gap, short = row.evidence.get("gap"), row.label
        if len(row.label) > width:
            yield from _wrapped(row.label)
            short = ""
        yield f"  {short:{width}}  {len(row.runs):5}  {row.loss.mean:.4f}  {shown(gap)}"
        if words := unseen(gap):
            yield from _wrapped(words, " " * (width + 4))
    found = group.verdict
    if found.choice:
        rule = f"By the rule of docs/report.md, with T = {found.tolerance:.2%}"
        firm = "." if not found.doubts else ", but the evidence does not separate the modes:"
        yield from _wrapped(f"{rule}, take {group.choice}{firm}")
    for text in found.doubts:
        yield from _wrapped(text)


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    """Return a text in lines of at most WIDTH columns, those after the first indented further."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )


def write(groups: Sequence[Group], left_out: Sequence, out: Path, *, latex: bool = False) -> None:
    """Write all files of the report; `out` is the old report or the new one, whole."""
    import datetime

    from mqo.launch.naming import folder_part
    from mqo.report import latex as tex
    from mqo.report import tables
    from mqo.report.page import page
    from mqo.report.pictures import draw, draw_gaps

    with replaced(out) as folder:
        today = datetime.date.today().isoformat()
        (folder / PAGE).write_text(page(groups, left_out, today), encoding="utf-8")
        tables.write(folder, tables.tables(groups, left_out))
        for number, group in enumerate(groups, 1):
            names = (group.model, group.dataset, group.config)
            name = "_".join((str(number), *map(folder_part, names)))
            draw(group, folder / name)
            draw_gaps(group, folder / name)
            if latex:
                (folder / f"{name}.tex").write_text(tex.table(group), encoding="utf-8")


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """Yield a folder to fill, which then takes the place of `target`, an older report or nothing.

    RunError where something else stands there.
    """
    from mqo.errors import RunError, full_disk_of
    from mqo.output import target_of

    target = target_of(target)
    ours = (target / PAGE).exists() and (target / "report.json").exists()
    if target.exists() and not ours and not (target.is_dir() and not any(target.iterdir())):
        raise RunError(
            f"{target} holds something else than a report",
            expected="a new folder, or an older report, which is replaced",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        full_disk_of(target.parent),
        temporary_folder(f".{target.name}-", target.parent) as place,
    ):
        new, old = place / "new", place / "old"
        new.mkdir()
        yield new
        if target.exists():
            target.rename(old)
        new.rename(target)
