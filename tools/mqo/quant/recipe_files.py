"""Find the files of recipes, and of what they name. Needs pydantic."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mqo.quant.formats import check_choice

HERE = Path(__file__).with_name("recipes")


def names() -> list[str]:
    """Return the names of the recipes in this package."""
    return sorted(path.stem for path in HERE.glob("*.toml"))


def path_of(name: str, folder: Path = Path()) -> Path:
    """Return the file of a recipe's name, or FILE.toml in a folder; ValueError lists the names."""
    if name.endswith(".toml"):
        return folder / name
    check_choice("recipe", name, names())
    return HERE / f"{name}.toml"


def plugin_files(path: Path, keys: Mapping[str, Any]) -> list[Path]:
    """Return the files of quantizers that a recipe in the file `path` names, absolute.

    They are relative to it, or else files of this package, so that copies of its recipes work.
    """
    named = keys.get("plugins", [])
    if not isinstance(named, list | tuple) or not all(isinstance(name, str) for name in named):
        raise ValueError(f"plugins = {named!r}; valid: a list of files of Python")
    own = [path.parent / name for name in named]
    files = [HERE / p.name if not p.exists() and (HERE / p.name).is_file() else p for p in own]
    return [Path(os.path.realpath(file)) for file in files]


def first_fault(error: Exception) -> str:
    """Return the text of the error, or of pydantic's first fault."""
    if not isinstance(error, ValidationError):
        return str(error)
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    return f"{where}: {fault['msg'].removeprefix('Value error, ')}".removeprefix(": ")


def with_recipes(
    path: Path, keys: Mapping[str, Any], read: Callable[[Path], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the keys of a recipe in the file `path`, with the recipes that its rules name.

    `read` returns the keys of a file. Of such a recipe, types, operands and quantizers apply; which
    layers it is for is said by the rule.

    Raises:
        ValueError: a name is unknown, or both recipes set an option of the whole run.
        OSError: a file cannot be read.
    """
    result = dict(keys)
    files = list(map(str, plugin_files(path, keys)))
    for name in _named(keys):
        recipes = result.get("recipes", {})
        if name in recipes:
            continue
        other = path_of(name, path.parent)
        table = read(other)
        _check_options(name, table.get("options", {}), keys.get("options", {}))
        taken = {key: table[key] for key in ("types", "operands") if key in table}
        result["recipes"] = {**recipes, name: taken}
        files += map(str, plugin_files(other, table))
        options = table.get("plugin_options", {})
        result["plugin_options"] = {**options, **result.get("plugin_options", {})}
    return result | {"plugins": tuple(dict.fromkeys(files))}


def _named(keys: Mapping[str, Any]) -> list[str]:
    """Return the recipes that rules name; a file with other errors is refused later."""
    rules, recipes = keys.get("rules", []), keys.get("recipes", {})
    if not isinstance(rules, list) or not isinstance(recipes, dict):
        return []
    names = [rule.get("recipe") for rule in rules if isinstance(rule, dict)]
    return [name for name in dict.fromkeys(names) if isinstance(name, str)]


def _check_options(name: str, options: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ValueError for options of a rule's recipe that this file does not have.

    The cache of weights, which runs may have or not, changes no value.
    """
    for key, value in options.items():
        if key != "cache_weights" and own.get(key) != value:
            raise ValueError(
                f"the recipe {name} of a rule has the option {key} = {value!r}, which is one of "
                f"the whole run; valid: options = {{ {key} = ... }} in this file, too"
            )
