"""`mqo diff`: show what differs from upstream; exit with 1 if anything does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from mqo.commands.options import EntriesArgument, JsonOption, TreeOption, patch_series, settled
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
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Show what differs from upstream (then exit 1): site patches in full, codemods as counts."""
    from mqo.overlay import diff as overlay

    patched, series = settled(tree), patch_series()
    if export:
        from mqo.overlay.patch_files import export as write

        files = write(patched, series, names or (), export, repository=Project.here().root)
        listed = [str(path) for path in files]
        emit("diff", None, "\n".join(listed), as_json, exported=listed)
        return
    changes = overlay.changes(patched, series, names or ())
    form: overlay.Form = "stat" if stat else "full" if all or names else "short"
    text = overlay.diff_lines(series, changes, form)
    rows = [asdict(change) | {"text": change.text} for change in changes]
    emit("diff", None, "\n".join(text), as_json, changes=rows)
    raise typer.Exit(1 if changes else 0)
