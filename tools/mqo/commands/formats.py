"""`mqo formats`: list the number formats, and check those of a user's file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from mqo.commands.options import FormatsOption, JsonOption
from mqo.extras import require
from mqo.program import call
from mqo.project import Project
from mqo.quant.formats import FORMATS, Format
from mqo.quant.own_formats import FormatRow
from mqo.terminal import emit
from mqo.untrusted import read_toml

PROGRAM = "tools/format_errors.py"
NOTE = (
    "bits: a stored element with its share of the scale. smallest, largest: positive\n"
    "values of an element. SQNR: of 2^20 values of N(0, 1), with default options."
)

formats = typer.Typer(name="formats", invoke_without_command=True)


@formats.callback()
def main(context: typer.Context) -> None:
    """List the number formats; check those of your own file."""
    if context.invoked_subcommand is None:
        list_()


@formats.command("list")
def list_(formats: FormatsOption = None, as_json: JsonOption = False) -> None:
    """List the number formats with their elements, scales, ranges and SQNR.

    Those of ~/.config/mqo/formats.toml, or of --formats, are at the end. `mqo formats` lists all
    but the latter.
    """
    from mqo.launch.own_types import OwnTypes

    rows = _rows(FORMATS, OwnTypes.from_options(formats).rows)
    emit("formats", None, _table(rows), as_json, formats=rows)


@formats.command()
def check(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A TOML file with tables \\[formats.NAME].")
    ],
    as_json: JsonOption = False,
) -> None:
    """Report the fault of each invalid row of a file, and list the valid ones.

    --formats FILE makes them types of a command, and `mqo.quant.load_formats(FILE)` of the library.
    Exit code 1 if a row is invalid.
    """
    from mqo.launch.own_formats import clash
    from mqo.quant.own_formats import own_formats, read_rows

    content = read_toml(file)
    valid, faults = read_rows(content, str(file))
    clashes = {name: fault for name in valid if (fault := clash(name, valid))}
    faults += clashes.values()
    valid = {name: row for name, row in valid.items() if name not in clashes}
    if not faults:
        own = own_formats(content, str(file))
        rows = _rows(valid, {name: each.row for name, each in own.items()})
        emit("formats", None, _table(rows), as_json, formats=rows, faults=faults)
        return
    lines = [*faults, f"valid: {', '.join(valid)}"] if valid else faults
    emit("formats", None, "\n".join(lines), as_json, formats=[], faults=faults)
    raise typer.Exit(1)


def _rows(formats: Mapping[str, Format], own: Mapping[str, FormatRow]) -> list[dict[str, Any]]:
    """Return the facts of formats, with the SQNR in dB; `own` are rows of the user."""
    require("torch")
    rows = {name: row.as_table() for name, row in own.items()}
    request = {"formats": [*formats], "own": rows}
    errors = call(Project.here().ours / PROGRAM, "measure", request)
    return [
        {
            "name": row.name,
            "bits": 8 * row.packed_bytes,
            "element": row.element.name,
            "block": row.block,
            "square": row.square,
            "scale": row.scale,
            "block_scale": row.block_scale and row.block_scale.name,
            "smallest": 2.0**row.element.min_exponent,
            "largest": row.element.max_value,
            "sqnr_db": errors[row.name],
            "source": row.source,
        }
        for row in formats.values()
    ]


def _table(rows: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join([*_lines(rows), "", NOTE])


def _lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a head and a line per format, of at most 80 columns."""
    yield _line("format", "bits", "element", "block", "scale", "smallest", "largest", "SQNR")
    for row in rows:
        scale = " ".join(filter(None, (row["scale"], row["block_scale"])))
        ends = (f"{row['smallest']:.3g}", f"{row['largest']:.5g}")
        block = str(row["block"] or "-")
        yield _line(
            row["name"],
            f"{row['bits']:.4g}",
            row["element"],
            block,
            scale,
            *ends,
            f"{row['sqnr_db']:.1f}",
        )


def _line(*cells: str) -> str:
    name, bits, element, block, scale, smallest, largest, decibels = cells
    return (
        f"{name:<16}{bits:>5}  {element:<8}{block:>5}  {scale:<16}{smallest:>9}"
        f"{largest:>9}{decibels:>6}"
    )
