"""Number formats of a user: rows of a file with the tables of formats.toml, which become types."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mqo.quant import formats
from mqo.quant.formats import Format, Minifloat, TaperedFormat, check_choice
from mqo.quant.plugins import PLUGINS, is_name

_TEXTS = ("element", "scale", "rounding", "block_scale", "source", "color", "light", "dark")
_KEYS = {**dict.fromkeys(_TEXTS, str), "block": int, "square": bool}
_DEFAULTS = {"rounding": "nearest-even", "color": "gray", "light": "#808080", "dark": "#808080"}
OWN: dict[str, str] = {}  # {name: the file that defines it}


def load_formats(file: str | os.PathLike[str]) -> list[str]:
    """Make the formats of a TOML file types, and return their names.

    The file has the tables [formats] and [elements] of formats.toml; an element is a minifloat or
    an integer. A format that is registered already must be the same.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not TOML, or a row is invalid; the text names the file and the row.
    """
    path = Path(file).resolve()
    try:
        rows = read_formats(tomllib.loads(path.read_text(encoding="utf-8")), str(path))
        for name, row in rows.items():
            if OWN.get(name) and formats.FORMATS[name] != row:
                raise ValueError(f"formats.{name}: {OWN[name]} defines it in another way")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    formats.FORMATS.update(rows)
    OWN.update(dict.fromkeys(rows, str(path)))
    return list(rows)


def read_formats(tables: Mapping[str, Any], source: str) -> dict[str, Format]:
    """Return the formats of a file's tables; ValueError names the first invalid row.

    `source` is the source of a row that names none.
    """
    rows, faults = read_rows(tables, source)
    if faults:
        raise ValueError(faults[0])
    return rows


def read_rows(tables: Mapping[str, Any], source: str) -> tuple[dict[str, Format], list[str]]:
    """Return the valid formats of a file's tables, and a sentence about each fault.

    `source` is the source of a row that names none.
    """
    faults = []
    for table, rows in tables.items():
        if table not in ("elements", "formats"):
            faults.append(f"unknown table {table!r}; valid: elements, formats")
        elif not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
            faults.append(f"{table} is not a table of rows; valid: [{table}.NAME]")
    if faults:
        return {}, faults
    elements, read = dict(formats.ELEMENTS), {}
    for name, row in tables.get("elements", {}).items():
        try:
            elements[name] = _element(name, row)
        except ValueError as error:
            faults.append(str(error))
    for name, row in tables.get("formats", {}).items():
        try:
            read[name] = _format(name, row, source, elements)
        except ValueError as error:
            faults.append(str(error))
    if not tables.get("formats"):
        faults.append("the file defines no format; valid: [formats.NAME]")
    return read, faults


def _element(name: str, row: dict[str, Any]) -> Minifloat | TaperedFormat:
    if name in formats.ELEMENTS:
        raise ValueError(f"elements.{name}: mqo has an element of this name; valid: another name")
    if "widths" in row:
        raise ValueError(f"elements.{name}: a tapered element needs code; valid: a minifloat")
    try:
        return formats.element_of(name, row)
    except (TypeError, ValueError) as error:
        raise ValueError(f"elements.{name}: {error}") from None


def _format(
    name: str, row: dict[str, Any], source: str, elements: Mapping[str, Minifloat | TaperedFormat]
) -> Format:
    if name in formats.QUANT_TYPES or name in PLUGINS:
        raise ValueError(f"formats.{name}: mqo has a type of this name; valid: another name")
    if not is_name(name):
        raise ValueError(
            f"formats.{name}: a type cannot have this name; valid: lower-case letters, digits "
            "and _, beginning with a letter"
        )
    try:
        for key, value in row.items():
            check_choice("key", key, tuple(_KEYS))
            if type(value) is not _KEYS[key]:
                raise ValueError(f"{key} = {value!r} is not of type {_KEYS[key].__name__}")
        for key in ("element", "scale"):
            if key not in row:
                raise ValueError(f"there is no {key}")
        # HiFloat4's scales are defined for its own element.
        check_choice("scale", row["scale"], tuple(k for k in formats.SCALE_BYTES if k != "hif4"))
        if row.get("square") and "block" not in row:
            raise ValueError("square needs a block")
        return formats.format_of_row(name, {**_DEFAULTS, "source": source, **row}, elements)
    except ValueError as error:
        raise ValueError(f"formats.{name}: {error}") from None
