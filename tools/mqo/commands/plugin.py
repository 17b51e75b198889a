"""`mqo plugin`: custom quantizers, which are functions in a file of Python."""

from __future__ import annotations

from collections.abc import Mapping
from keyword import iskeyword
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mqo.commands.options import JsonOption
from mqo.errors import OutputError, PluginError
from mqo.output import new_file, target_of
from mqo.project import Project
from mqo.quant.formats import source_types
from mqo.quant.plugins import NAMES, is_name
from mqo.terminal import emit

if TYPE_CHECKING:
    from mqo.recipes.quantizer_packages import QuantizerPackage

PROGRAM = "tools/check_quantizer.py"
TEMPLATE = Path(__file__).with_name("plugin.py.txt")

plugin = typer.Typer(
    name="plugin", help="Write, check and list quantizers in Python.", no_args_is_help=True
)


@plugin.command()
def new(
    target: Annotated[Path, typer.Argument(help="The file to write: NAME.py.", metavar="FILE")],
) -> None:
    """Write a commented quantizer to start from; its name is that of the file."""
    path = target_of(target)
    name = path.stem
    if path.suffix != ".py" or not is_name(name) or iskeyword(name) or name in source_types():
        raise OutputError(
            f"{target} is not named after a new quantizer",
            expected=f"NAME.py, where NAME is {NAMES}, and types such as nvfp4",
        )
    if path.exists():
        raise OutputError(f"{target} exists; nothing was written", expected="a new name")
    text = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(name=name)
    with new_file(path) as file:
        file.write_text(text, encoding="utf-8")
    print(f"{target}: check it with `mqo plugin check {target}`")


@plugin.command("list")
def list_(as_json: JsonOption = False) -> None:
    """List the quantizers that installed packages offer, without running them.

    `--plugin NAME` uses them. A package offers a module as an entry point `mqo.quantizers`.
    """
    from mqo.recipes.quantizer_packages import packages

    rows = [_row(package) for package in packages()]
    text = "\n\n".join(map(_shown, rows)) or "no installed package offers quantizers"
    emit("plugins", None, text, as_json, packages=rows)


def _row(package: QuantizerPackage) -> dict[str, Any]:
    """Return what an entry point offers; `fault` is '' unless it cannot be used."""
    from mqo.quant.plugin_source import declared

    file, quantizers, fault = None, {}, ""
    try:
        file = package.file()
        quantizers = {name: row.declaration for name, row in declared(file).items()}
    except PluginError as error:
        fault = str(error)
    except ValueError as error:
        fault = f"The quantizers cannot be read: {error}"
    return {
        "name": package.name,
        "distribution": package.distribution.name,
        "version": package.distribution.version,
        "module": package.module,
        "file": file and str(file),
        "quantizers": quantizers,
        "fault": fault,
    }


def _shown(row: Mapping[str, Any]) -> str:
    """Return a row of the list as text: the entry point, and a line for each quantizer."""
    lines = [f"{row['name']} ({row['distribution']} {row['version']}): {row['file'] or 'no file'}"]
    for name, declaration in row["quantizers"].items():
        words = [f"{key}={value}" for key, value in declaration.items()]
        lines.append("    " + "  ".join([name, *words]))
    return "\n".join([*lines, f"    {row['fault']}"] if row["fault"] else lines)


@plugin.command()
def check(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A file of Python, or a name in `mqo plugin list`; its code is run.",
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Test what the quantizers of a file must do and declare, and measure their error and time.

    Exit code 1 if a check failed.
    """
    from mqo.program import call
    from mqo.recipes.quantizer_packages import file_of

    file = file_of(file)
    if not file.is_file():
        raise PluginError(f"{file} is not a file", expected="a file of Python with @quantizer")
    request = {"file": file.resolve()}
    rows = call(Project.here().ours / PROGRAM, "check", request, error=PluginError)
    text = "\n\n".join(row.pop("text") for row in rows)
    emit("plugin", None, text, as_json, quantizers=rows)
    if not all(row["passed"] for row in rows):
        raise typer.Exit(1)
