"""The quantizer's options, read once per process from the TOML file that MQO_QUANT_CONFIG names."""

import functools
import os
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mqo.quant.config_checks import check_layers, check_own_types
from mqo.quant.formats import SITES, check_choice, check_type
from mqo.quant.layer_rules import parse_recipes, parse_rules
from mqo.quant.operand_table import parse_operands, row_of
from mqo.quant.options import ENVIRONMENT_VARIABLE, OPTIONS, TABLES, check_value
from mqo.quant.own_formats import FormatRow
from mqo.quant.plugin_rows import PluginRow
from mqo.quant.quant_config import QuantConfig
from mqo.quant.schedule import parse_schedule

# The tables of the file, with a check for each of their keys.
_CHECKS: dict[str, dict[str, Callable[[object], object]]] = {
    table: {o.name: o.check for o in OPTIONS.values() if o.table == table} for table in TABLES
}
_CHECKS["asked"] = dict.fromkeys(SITES, check_type)
_CHECKS["schedule"] = dict.fromkeys(SITES, parse_schedule)
_TABLES = (*_CHECKS, "operands", "rules", "recipes", "formats", "plugins")
# The options of a block of `using`, in place of the file's.
_used: QuantConfig | None = None


def current() -> QuantConfig:
    """Return this process's options: from the file that MQO_QUANT_CONFIG names, or the defaults.

    This runs the files in [plugins]: a command has started this process for the run that has them.

    Raises:
        QuantizerError: a file of quantizers cannot be run, or declares something else.
        FileNotFoundError: the named file does not exist.
        ValueError: the file is not TOML, or has an unknown key or value; the text names the file,
            the key and the valid ones.
    """
    return _used or _of_file()


@functools.cache
def _of_file() -> QuantConfig:
    path = os.environ.get(ENVIRONMENT_VARIABLE)
    if not path:
        return QuantConfig()
    config = load(Path(path))
    if any(row.file for row in config.plugins.values()):
        from mqo.quant.plugin_file import load_rows  # imports torch, which commands do not load

        load_rows(config.plugins, Path(path).parent)
    return config


def reset() -> None:
    """Forget the options, so that the next `current()` reads them again."""
    _of_file.cache_clear()


@contextmanager
def using(options: QuantConfig) -> Iterator[None]:
    """Make these the options of this process in this block."""
    global _used
    before, _used = _used, options
    try:
        yield
    finally:
        _used = before


def load(path: Path) -> QuantConfig:
    """Read the options from the TOML file `path`; raise what `current` raises."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse(text: str) -> QuantConfig:
    """Read the options from TOML; raise a ValueError that names the key and the valid ones."""
    tables = tomllib.loads(text)
    # Before names of types are checked.
    formats = _declared("formats", FormatRow, tables.pop("formats", {}))
    plugins = _declared("plugins", PluginRow, tables.pop("plugins", {}))
    operands = parse_operands(tables.pop("operands", {}))
    recipes = parse_recipes(tables.pop("recipes", {}))
    rules = parse_rules(tables.pop("rules", []))
    for name, table in tables.items():
        _check_table(name, table)
    types = tables.pop("asked", {})
    schedule = {site: parse_schedule(text) for site, text in tables.pop("schedule", {}).items()}
    options = {key: value for table in tables.values() for key, value in table.items()}
    lists = {key: tuple(value) for key, value in options.items() if isinstance(value, list)}
    parts = {"asked": types, "schedule": schedule, "operands": operands, "rules": rules}
    parts |= {"recipes": recipes, "formats": formats, "plugins": plugins}
    config = QuantConfig(**parts, **(options | lists))
    check_layers(config)
    check_own_types(config)
    return config


def _declared(name: str, kind: type, table: object) -> dict[str, Any]:
    """Read [formats] or [plugins], and make each row a type, without running code."""
    if not isinstance(table, dict):
        raise ValueError(f"{name} = {table!r} should be a table, [{name}]")
    rows = {}
    for key, row in table.items():
        rows[key] = row_of(f"{name}.{key}", kind, row)
        rows[key].declare(key)
    return rows


def _check_table(name: str, table: object) -> None:
    check_choice("table", name, _TABLES)
    if not isinstance(table, dict):
        raise ValueError(f"{name} = {table!r} should be a table, [{name}]")
    for key, value in table.items():
        check_choice(f"key in [{name}]", key, tuple(_CHECKS[name]))
        check_value(name, key, _CHECKS[name][key], value)
