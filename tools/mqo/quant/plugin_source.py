"""Read what a Python file declares with @quantizer, without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mqo.quant.plugin_modules import read_module
from mqo.quant.plugin_rows import check_free
from mqo.quant.plugins import Plugin

DECORATOR = "quantizer"
# {argument of the decorator, besides the name: field}
_SAME = (
    *("block", "square", "stochastic", "independent_rows", "options", "state", "estimator"),
    *("terms", "idempotent", "multiple"),
)
_FIELDS = {name: name for name in _SAME} | {"needs_amax": "needs_tensor_amax"}


def declared(path: Path) -> dict[str, Plugin]:
    """Return {name: quantizer} of the functions with @quantizer at the top level of a file.

    Raises:
        ValueError: the file is not Python, an argument is not a literal, a declaration is invalid,
            or there is none; the text says which.
    """
    if path.suffix != ".py":
        raise ValueError(f"{path} is not a file of Python; valid: a name that ends in .py")
    plugins: dict[str, Plugin] = {}
    for node in read_module(path).body:
        for call in _decorators(node):
            plugin = _plugin(path, call)
            if plugin.name in plugins:
                raise ValueError(f"{path} has two quantizers {plugin.name}")
            plugins[plugin.name] = plugin
    if not plugins:
        raise ValueError(f"{path} has no function with @{DECORATOR}('name')")
    return plugins


def _decorators(node: ast.stmt) -> Iterator[ast.Call]:
    if not isinstance(node, ast.FunctionDef):
        return
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call):
            name = decorator.func
            if getattr(name, "id", getattr(name, "attr", "")) == DECORATOR:
                yield decorator


def _plugin(path: Path, call: ast.Call) -> Plugin:
    where = f"@{DECORATOR} in line {call.lineno} of {path}"
    try:
        names = [ast.literal_eval(argument) for argument in call.args]
        given = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (ValueError, TypeError):
        raise ValueError(f"{where} has an argument that is not a literal") from None
    names += [given.pop("name")] if "name" in given else []
    for name in ("options", "state"):
        if given.get(name, ()) is None:  # the decorator's default
            del given[name]
    unknown = given.keys() - _FIELDS.keys()
    try:
        if unknown or len(names) != 1:
            raise TypeError
        fields: dict[str, Any] = {_FIELDS[name]: value for name, value in given.items()}
        plugin = Plugin(names[0], **fields)
        check_free(plugin.name)
    except TypeError:
        raise ValueError(f"{where} has an unknown argument, or no name") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return plugin
