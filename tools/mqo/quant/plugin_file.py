"""Read a file with quantizers of the user: this runs its code."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mqo.quant.plugin_calls import QuantizerError
from mqo.quant.plugin_rows import PluginRow
from mqo.quant.plugin_source import local_files
from mqo.quant.plugins import PLUGINS, Plugin


def load_quantizers(file: str | os.PathLike[str]) -> list[str]:
    """Run a Python file, and return the names of the quantizers that it registers.

    It may import modules of its folder, at its top. Two files may import different modules of the
    same name, each from its own folder.

    Raises:
        FileNotFoundError: the file does not exist.
        QuantizerError: the file is not Python, raises an error, or registers no quantizer.
    """
    path = Path(file).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    before = dict(PLUGINS)
    spec = importlib.util.spec_from_file_location(f"mqo_plugin_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise QuantizerError(f"{path} is not a file of Python; valid: a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with _own_modules(path):
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[spec.name]
            refusal = f"{path} cannot be run{_line(error, path)}"
            raise QuantizerError(f"{refusal}: {_text(error)}") from error
    names = [name for name, plugin in PLUGINS.items() if before.get(name) is not plugin]
    if not names:
        raise QuantizerError(f"{path} registers no quantizer; valid: a function with @quantizer")
    return names


def load_rows(rows: Mapping[str, PluginRow], folder: Path) -> None:
    """Run the files of a run's quantizers, relative to `folder`.

    Raises:
        QuantizerError: a file is missing or cannot be run, or its quantizers are not those that
            the run declares.
    """
    declared = {name: Plugin(name, **row.declared) for name, row in rows.items()}
    for file in dict.fromkeys(row.file for row in rows.values() if row.file):
        path = folder / file
        try:
            names = load_quantizers(path)
        except FileNotFoundError as error:
            raise QuantizerError(str(error)) from None
        wanted = {name: declared[name] for name, row in rows.items() if row.file == file}
        if {name: PLUGINS[name] for name in names} != wanted:
            differing = {*names} ^ {*wanted} or {n for n in names if PLUGINS[n] != wanted[n]}
            raise QuantizerError(
                f"{path} registers {', '.join(sorted(differing))} with other arguments than its "
                "text has; valid: @quantizer with literals, on functions at the top level"
            )


@contextmanager
def _own_modules(path: Path) -> Iterator[None]:
    """Import the modules of the file's folder, and not others of the same names, in this block."""
    folder = path.parent
    try:
        files = local_files(path)[1:]
    except ValueError:  # running the file reports it
        files = []
    names = {file.relative_to(folder).parts[0].removesuffix(".py") for file in files}
    kept = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in names
    }
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.update(kept)


def _line(error: Exception, path: Path) -> str:
    """Return ', in line N' for the last line of the file that led to an error."""
    if isinstance(error, SyntaxError):
        return f", in line {error.lineno}" if error.filename == str(path) else ""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(path)]
    return f", in line {lines[-1]}" if lines else ""


def _text(error: Exception) -> str:
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {' '.join(message.split())}"
