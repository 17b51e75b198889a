"""`mqo plugin`: quantizers of the user, which are functions in a file of Python."""

from __future__ import annotations

from keyword import iskeyword
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from mqo.commands.options import JsonOption
from mqo.errors import OutputError, PluginError
from mqo.output import new_file, target_of
from mqo.project import Project
from mqo.quant.formats import QUANT_TYPES
from mqo.quant.plugins import is_name
from mqo.terminal import emit

PROGRAM = "tools/check_quantizer.py"
TEMPLATE = Path(__file__).with_name("plugin.py.txt")

plugin = typer.Typer(
    name="plugin", help="Write and check a quantizer in Python.", no_args_is_help=True
)


@plugin.command()
def new(
    target: Annotated[Path, typer.Argument(help="The file to write: NAME.py.", metavar="FILE")],
) -> None:
    """Write a commented quantizer to start from; its name is that of the file."""
    path = target_of(target)
    name = path.stem
    if path.suffix != ".py" or not is_name(name) or iskeyword(name) or name in QUANT_TYPES:
        raise OutputError(
            f"{target} is not named after a new quantizer",
            expected="NAME.py, with lower-case letters, digits and _, beginning with a letter, and "
            "no name of a type",
        )
    if path.exists():
        raise OutputError(f"{target} exists; nothing was written", expected="a new name")
    text = Template(TEMPLATE.read_text(encoding="utf-8")).substitute(name=name)
    with new_file(path) as file:
        file.write_text(text, encoding="utf-8")
    print(f"{target}: check it with `mqo plugin check {target}`")


@plugin.command()
def check(
    file: Annotated[Path, typer.Argument(help="A file of Python; its code is run.")],
    as_json: JsonOption = False,
) -> None:
    """Test what the quantizers of a file must do and declare, and measure their error and time.

    Exit code 1 if a check failed.
    """
    from mqo.program import ask

    if not file.is_file():
        raise PluginError(f"{file} is not a file", expected="a file of Python with @quantizer")
    facts = ask(Project.here().ours / PROGRAM, [str(file.resolve())], error=PluginError)
    rows = facts["quantizers"]
    text = "\n\n".join(row.pop("text") for row in rows)
    emit("plugin", None, text, as_json, **facts)
    if not all(row["passed"] for row in rows):
        raise typer.Exit(1)
