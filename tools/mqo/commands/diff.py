"""`mqo diff`: show what differs from upstream; exit with 1 if anything does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from mqo.commands.options import (
    EntriesArgument,
    JsonOption,
    TreeOption,
    patch_series,
    root_of,
    settled,
)
from mqo.display import stderr
from mqo.errors import OverlayError
from mqo.project import Project
from mqo.terminal import emit


def diff(
    names: EntriesArgument = None,
    stat: Annotated[bool, typer.Option("--stat", help="Show only counts.")] = False,
    all: Annotated[bool, typer.Option("--all", help="Also show codemods in full.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            help="Write one patch file per entry to this new folder, outside of this checkout."
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="RELEASE",
            help="Compare any tree with a release, or a git work tree with a tag or commit.",
        ),
    ] = None,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Show what differs from upstream (then exit 1): site patches in full, codemods as counts."""
    from mqo.overlay import diff as overlay

    if against:
        if names or all or export:
            raise OverlayError(
                "--against was given with patches, --all or --export",
                expected="--against by itself, or with --stat, --json and --tree",
            )
        _compare(root_of(tree), against, stat, as_json)
    patched, series = settled(tree), patch_series()
    if export:
        from mqo.overlay.patch_files import export as write

        files = write(patched, series, names or (), export, repository=Project.here().root)
        listed = [str(path) for path in files]
        emit("diff", None, "\n".join(listed), as_json, exported=listed)
        return
    changes = overlay.changes(patched, series, names or ())
    form: overlay.Form = "stat" if stat else "full" if all or names else "short"
    text = [*overlay.diff_lines(series, changes, form)]
    if patched.is_checkout and not changes:
        text.append("# HEAD counts as upstream; --against RELEASE compares with a release")
    rows = [asdict(change) | {"text": change.text} for change in changes]
    emit("diff", None, "\n".join(text), as_json, changes=rows)
    raise typer.Exit(1 if changes else 0)


def _compare(root: Path, name: str, stat: bool, as_json: bool) -> NoReturn:
    """Print how the tree differs from a release or commit; exit with 1 if it does."""
    from mqo.overlay import against
    from mqo.overlay.pin import Pin

    project = Project.here()
    pin = Pin.load(project.upstream_pin)
    expected = against.contents(root, name, pin, project.cache, stderr())
    diffs = against.differences(root, expected)
    text = "\n".join(against.lines(diffs, name, stat=stat))
    rows = [{n: getattr(diff, n) for n in ("path", "added", "removed", "text")} for diff in diffs]
    emit("diff", None, text, as_json, changes=rows)
    raise typer.Exit(1 if diffs else 0)
