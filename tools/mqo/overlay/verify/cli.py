"""The command `mqo verify`, and its table: a row an entry, a column a release."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mqo.display import stderr
from mqo.errors import check_name
from mqo.project import Project
from mqo.terminal import JsonOption, emit

if TYPE_CHECKING:
    from mqo.overlay.vendor import Pin
    from mqo.overlay.verify.release import Verified

# The outcomes in few letters, for a series of many releases.
SHORT = {
    "applied": "yes",
    "not needed": "-",
    "drifted": "LOST",
    "not tried": "?",
    "compiled only": "comp",
    "failed": "FAIL",
}


def verify(
    version: Annotated[
        list[str] | None, typer.Option(help="A release, repeatable; by default the pinned one.")
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="Every release in UPSTREAM.toml.")] = False,
    as_json: JsonOption = False,
    trees: Annotated[
        list[Path] | None,
        typer.Option(
            "--tree", help="A tree, or git checkout, whose upstream files are tried; repeatable."
        ),
    ] = None,
) -> None:
    """Try the patches on upstream releases, and on trees and checkouts, in temporary trees.

    Exits with 1 if a release is not green, and with 2 if one could not be tried.
    """
    from mqo.overlay.series import Series
    from mqo.overlay.tree import Tree
    from mqo.overlay.vendor import Pin
    from mqo.overlay.verify.release import verify as try_release
    from mqo.overlay.verify.release import verify_tree

    project = Project.here()
    pin, series, cache = Pin.load(project.upstream_pin), Series.of(project), project.cache
    places = [Tree(path.resolve()) for path in trees or []]
    for place in places:
        place.upstream()  # what cannot be tried is said before anything is
    # Trees alone, unless releases are named, too.
    names = _chosen(version or [], all, pin) if version or all or not places else []
    with stderr().live() as display:
        results = []
        for n, name in enumerate(names, 1):
            at = f" ({n} of {len(names)})" if names[1:] else ""
            results.append(try_release(name, pin, series, cache, report=display, place=at))
        results += [verify_tree(place, pin, series, cache, report=display) for place in places]
    rows = [result.as_table() for result in results]
    emit("verify", None, "\n".join(lines(results)), as_json, releases=rows)
    raise typer.Exit(exit_code(results))


def exit_code(results: Sequence[Verified]) -> int:
    """Return 0 when all are green, 1 when one is not, 2 when one could not be tried."""
    if any(result.error for result in results):
        return 2
    return 0 if all(result.green for result in results) else 1


def _chosen(named: list[str], every: bool, pin: Pin) -> list[str]:
    if named and every:
        raise typer.BadParameter("--all and --version exclude each other")
    for name in named:
        check_name("megatron-core release in UPSTREAM.toml", name, pin.releases)
    return pin.releases if every else list(dict.fromkeys(named or [pin.version]))


# -- the table --------------------------------------------------------------------------------


def lines(results: Sequence[Verified]) -> list[str]:
    """Return lines for 80 columns: the table, the verdict, and what there is to say."""
    rows = [["", *_heads([result.version for result in results])]]
    for place, entry in enumerate(results[0].entries):
        rows.append([entry.name, *(result.entries[place].outcome for result in results)])
    rows.append(["forward pass", *(result.forward for result in results)])
    rows = [[SHORT.get(cell, cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        " ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    red = [result.version for result in results if not result.green]
    verdict = f"NOT green: {', '.join(red)}" if red else "all green"
    return [*table, verdict, *(f"{r.version}: {n}" for r in results for n in _notes(r))]


def _heads(versions: Sequence[str]) -> list[str]:
    """Return the versions without their last number, where that tells them apart."""
    short = [version.rpartition(".")[0] or version for version in versions]
    return short if len(set(short)) == len(versions) else list(versions)


def _notes(result: Verified) -> Iterable[str]:
    if result.error:
        yield result.error
    for entry in result.entries:
        if entry.why:
            yield f"{entry.name} drifted: {entry.why}"
    if result.lacks:
        yield f"compiled only: needs {result.lacks}, which is not installed"
    yield from result.faults
