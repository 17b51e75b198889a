"""Start upstream faster with the same results, by deferring work that a run may not need."""

import ast
import functools
import inspect
import linecache
from collections.abc import Callable, Mapping
from typing import Any

import torch

_compile, _getsource = torch.compile, inspect.getsource


def compile_late() -> None:
    """Make torch.compile compile a function on its first call, on a CPU.

    torch.compile imports its compiler at once, which takes a second, and upstream decorates a
    method that only inference uses. With CUDA, where upstream compiles more, nothing changes.
    """
    if not torch.cuda.is_available():
        torch.compile = _late


def _late(model: Callable | None = None, **options: Any) -> Callable:
    if model is None:
        return functools.partial(_late, **options)
    if isinstance(model, torch.nn.Module):
        return _compile(model, **options)
    build = functools.cache(lambda: _compile(model, **options))

    @functools.wraps(model)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        return build()(*args, **kwargs)

    return compiled


def quicken_sources() -> None:
    """Make inspect.getsource parse a file once instead of once per class.

    Upstream's parser of flags reads the sources of thirty classes, whose docstrings are its help.
    """
    inspect.getsource = source_of  # type: ignore[assignment]


def source_of(thing: Any) -> str:
    """Return the source of `thing`, as inspect.getsource does."""
    file = inspect.getsourcefile(thing) if isinstance(thing, type) else None
    if file and (lines := _classes(file).get(thing.__qualname__)):
        return "".join(linecache.getlines(file)[slice(*lines)])
    return _getsource(thing)


@functools.cache
def _classes(file: str) -> Mapping[str, tuple[int, int | None]]:
    """Return the line range of each top-level class in a file, including decorators."""
    tree = ast.parse("".join(linecache.getlines(file)))
    ranges = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            ranges[node.name] = (first - 1, node.end_lineno)
    return ranges
