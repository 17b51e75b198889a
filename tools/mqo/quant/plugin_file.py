"""Read a file with custom quantizers: this runs its code."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from mqo.quant.plugin_context import QuantizerError
from mqo.quant.plugin_modules import Location, local_files, location_of
from mqo.quant.plugin_rows import PluginRow
from mqo.quant.plugins import PLUGINS, Plugin


def load_quantizers(file: str | os.PathLike[str]) -> list[str]:
    """Run a Python file, and return the names of the quantizers that it registers.

    It may import modules of its folder, or of the package that it is in, at its top. Two files may
    import different modules of the same name, each from its own folder.

    Raises:
        FileNotFoundError: the file does not exist.
        QuantizerError: the file is not Python, raises an error, or registers no quantizer.

    Examples:
        >>> text = "from mqo.quant import quantizer\\n@quantizer('integers')\\n"
        >>> text += "def integers(x, context):\\n    return x.round()\\n"
        >>> _ = Path("mine.py").write_text(text)
        >>> load_quantizers("mine.py")
        ['integers']
    """
    path = Path(file).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    if path.suffix != ".py":
        raise QuantizerError(f"{path} is not a file of Python; valid: a name that ends in .py")
    before, location = dict(PLUGINS), _location(path)
    with _own_modules(path, location):
        try:
            _run(path, location)
        except Exception as error:
            refusal = f"{path} cannot be run{_line(error, path)}"
            raise QuantizerError(f"{refusal}: {_text(error)}") from error
    names = [
        name
        for name, plugin in PLUGINS.items()
        if before.get(name) is not plugin and _is_of(plugin, location)
    ]
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


def _location(path: Path) -> Location:
    try:
        return location_of(path)
    except ValueError:  # running the file reports it
        return Location(path.parent, "", path.stem, path.stem)


def _run(path: Path, location: Location) -> None:
    if location.package:
        importlib.invalidate_caches()  # a copy may be newer
        importlib.import_module(location.module)
        return
    spec = importlib.util.spec_from_file_location(f"mqo_plugin_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception:
        del sys.modules[spec.name]
        raise


def _is_of(plugin: Plugin, location: Location) -> bool:
    """Return whether the file itself defines a quantizer: its package may define others, too."""
    return not location.package or getattr(plugin.function, "__module__", "") == location.module


@contextmanager
def _own_modules(path: Path, location: Location) -> Iterator[None]:
    """Import the file's own modules, and not others of the same names, in this block."""
    folder = location.base
    try:
        files = local_files(path)[1:]
    except ValueError:  # running the file reports it
        files = []
    names = {file.relative_to(folder).parts[0].removesuffix(".py") for file in files}
    if location.package:
        names = {location.package}
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
