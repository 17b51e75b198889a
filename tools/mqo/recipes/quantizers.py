"""Make the quantizers in a file of the user known by name, without running the file."""

from __future__ import annotations

from os.path import realpath
from pathlib import Path

from mqo.errors import PluginError
from mqo.matrix import tables
from mqo.quant.plugin_rows import declare
from mqo.quant.plugin_source import declared
from mqo.quant.plugins import Plugin


def declare_file(path: Path) -> dict[str, Plugin]:
    """Make the quantizers that a file declares types, and return them by name.

    Raises:
        PluginError: the file is missing, is not Python, or declares no valid quantizer.
    """
    path = Path(realpath(path))  # of a loop of links, too
    try:
        plugins = declared(path)
    except ValueError as error:
        raise PluginError(
            f"The quantizers cannot be read: {error}",
            expected="a file of Python with @quantizer and literal arguments",
            help="`mqo plugin new FILE` writes one to start from, and `mqo plugin check FILE` "
            "checks it",
        ) from None
    for name, plugin in plugins.items():
        if clash := tables.clash(name, {*tables.quant_types(), *plugins}):
            raise PluginError(f"{path}: '{clash}' is the name of a mode", expected="another name")
        declare(plugin)
    return plugins
