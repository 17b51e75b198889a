"""`mqo matrix`: write the training scripts, and list the names they are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mqo.errors import MqoError
from mqo.output import folder_of
from mqo.project import Project

matrix = typer.Typer(
    name="matrix", help="Write the training scripts, and list the names.", no_args_is_help=True
)


@matrix.command()
def generate(
    types: Annotated[
        str | None, typer.Option(help="Quant types to write scripts for: nvfp4,hif4, or all.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="With --types: the folder for the scripts.")
    ] = None,
) -> None:
    """Write the pretrain scripts, and the tables of modes, formats and patched files in the docs.

    With --types and --out: write the scripts of other types, and nothing else.
    """
    project = Project.here()
    own = project.root / "script"
    if project.is_installed:
        raise MqoError("Scripts need the launcher of a clone", expected="a clone of mqo")
    from mqo.matrix.generate import write
    from mqo.matrix.tables import expand, quant_types

    if (types is None) != (out is None) or (out and out.resolve() == own):
        raise MqoError(
            f"{own} is only for the documented scripts",
            expected="--types with --out and another folder, or neither option",
        )
    named = types and expand("quant type", dict.fromkeys(quant_types()), types)
    changed = write(folder_of(out) if out else own, named)
    if not out:
        changed += _write_file_table(project)
    print("\n".join(map(str, changed)) or "nothing to do: all files are up to date")


def _write_file_table(project: Project) -> list[Path]:
    """Write the table of patched files; return the page if it changed. It needs a patched tree."""
    from mqo.matrix.generate import write_table
    from mqo.overlay.file_table import file_table
    from mqo.overlay.tree import Tree

    manifest = Tree(project.tree).manifest()
    if manifest is None:
        return []
    return write_table(project.tree / "README.md", "patched files", file_table(manifest))


@matrix.command(name="list")
def list_names() -> None:
    """List models, datasets, modes and training configurations."""
    from mqo.launch.arguments import listing

    print(listing())
