"""Read a file with quantizers of the user: this runs its code."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mqo.quant.plugin_calls import QuantizerError
from mqo.quant.plugins import PLUGINS


def load_quantizers(file: str | os.PathLike[str]) -> list[str]:
    """Run a Python file, and return the names of the quantizers that it registers.

    It may import modules of its folder.

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
    with _first_on_path(path.parent):
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            refusal = f"{path} cannot be run{_line(error, path)}"
            raise QuantizerError(f"{refusal}: {_text(error)}") from error
    names = [name for name, plugin in PLUGINS.items() if before.get(name) is not plugin]
    if not names:
        raise QuantizerError(f"{path} registers no quantizer; valid: a function with @quantizer")
    return names


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


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
