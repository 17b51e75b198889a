"""`mqo verify`: try the patches on upstream's releases and on trees."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mqo.commands.options import JsonOption
from mqo.display import stderr
from mqo.errors import check_name
from mqo.overlay.verify.table import exit_code, table_lines
from mqo.project import Project
from mqo.terminal import emit

if TYPE_CHECKING:
    from mqo.overlay.vendor import Pin


def verify(
    version: Annotated[
        list[str] | None, typer.Option(help="A release, repeatable; by default the pinned one.")
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="Every release in UPSTREAM.toml.")] = False,
    as_json: JsonOption = False,
    trees: Annotated[
        list[Path] | None,
        typer.Option("--tree", help="A tree or git checkout to try the patches on; repeatable."),
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
    pin, series, cache = Pin.load(project.upstream_pin), Series.of_project(project), project.cache
    others = [Tree(path.resolve()) for path in trees or []]
    for other in others:
        other.upstream()  # refuse trees that cannot be tried before trying any
    # With --tree, releases are tried only if they are named.
    names = _chosen(version or [], all, pin) if version or all or not others else []
    with stderr().live() as display:
        results = []
        for n, name in enumerate(names, 1):
            at = f" ({n} of {len(names)})" if names[1:] else ""
            results.append(try_release(name, pin, series, cache, report=display, position=at))
        results += [verify_tree(other, pin, series, cache, report=display) for other in others]
    rows = [result.as_table() for result in results]
    emit("verify", None, "\n".join(table_lines(results)), as_json, releases=rows)
    raise typer.Exit(exit_code(results))


def _chosen(named: list[str], every: bool, pin: Pin) -> list[str]:
    if named and every:
        raise typer.BadParameter("--all and --version cannot be combined")
    for name in named:
        check_name("megatron-core release in UPSTREAM.toml", name, pin.releases)
    return pin.releases if every else list(dict.fromkeys(named or [pin.version]))
