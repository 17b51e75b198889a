"""Read TOML files that users edit into frozen dataclasses, and check every value.

A field's annotation is its schema: int, str, Literal, tuple[X, ...], Mapping[str, X], or another
dataclass; a field without a default is required, and a key without a field is refused. pydantic
would do the same, but takes 0.1 s to import, and every `mqo status` reads such a table.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from mqo.errors import TableError
from mqo.untrusted import NoFileError, UntrustedFileError, read_toml

RowT = TypeVar("RowT")
_WORDS: Mapping[Any, str] = {
    str: "a string",
    int: "an integer",
    tuple: "a list",
    Mapping: "a table",
}


def read_table(path: Path, kind: type[RowT], schema: int) -> RowT:
    """Read a TOML file whose key `schema` is `schema` into the dataclass `kind`.

    Raises:
        TableError: it cannot be read, is not TOML, has another schema, or does not fit `kind`.
    """
    try:
        table = read_toml(path)
    except NoFileError as error:
        raise refusal(path, error.fault) from error
    except UntrustedFileError as error:
        raise refusal(path, f"is not TOML ({error.fault})") from error
    version = table.pop("schema", None)
    if type(version) is not int or version != schema:
        has = "no schema" if version is None else f"schema {reprlib.repr(version)}"
        raise refusal(path, f"has {has}", expected=f"schema {schema}, which this mqo reads")
    return build(kind, table, path)


def build(kind: type[RowT], table: object, path: Path, where: str = "", **given: Any) -> RowT:
    """Make a `kind` of a table; `given` are fields that do not come from it.

    Args:
        kind: the dataclass.
        table: the content of the file.
        path: the file, for the error.
        where: the position in the file, for the error: "entry 'x'".
        given: fields that the file does not have.

    Raises:
        TableError: a key is unknown or missing, or a value is of another type.
    """
    if not isinstance(table, dict):
        raise _misfit(path, where or "it", table, Mapping)
    wanted: dict[str, Field] = {f.name: f for f in fields(kind) if f.name not in given}  # type: ignore[arg-type]
    prefix = f"{where}: " if where else ""
    for key in sorted(table.keys() - wanted.keys()):
        raise refusal(path, f"{prefix}unknown key {key!r}", f"one of {', '.join(wanted)}")
    for name, field in wanted.items():
        if name not in table and field.default is field.default_factory is MISSING:
            raise refusal(path, f"{prefix}no key '{name}'", f"all of {', '.join(wanted)}")
    hints = get_type_hints(kind)
    values = {k: _value(hints[k], v, path, f"{prefix}{k}") for k, v in table.items()}
    return kind(**values, **given)


def refusal(path: Path, fault: str, expected: str = "") -> TableError:
    """Return the error for a table: `fault` tells where in the file, and what is wrong."""
    joint = " " if fault.startswith(("cannot", "is ", "has ")) else ": "
    return TableError(
        f"{path}{joint}{' '.join(fault.split())}",
        expected=expected or "a table as in docs/overlay.md",
        help="Correct the file; `git diff` shows the changes to it. Nothing was written",
    )


def check_specifier(text: str, path: Path, where: str) -> None:
    """Refuse a text that is not a range of versions, such as ">=0.10,<0.20"; "" is any version."""
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        raise refusal(path, f"{where} = {reprlib.repr(text)}", "a range: '>=0.10,<0.20'") from error


def check_text(pattern: re.Pattern[str], text: str, path: Path, where: str, example: str) -> None:
    """Refuse a text that does not match completely."""
    if not pattern.fullmatch(text):
        raise refusal(path, f"{where} = {reprlib.repr(text)}", f"such as '{example}'")


def _value(kind: Any, value: object, path: Path, where: str) -> Any:
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Literal:
        if value not in inner:
            listed = ", ".join(map(repr, inner))
            raise refusal(path, f"{where} = {reprlib.repr(value)}", f"one of {listed}")
        return value
    if is_dataclass(kind):
        return build(kind, value, path, where)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list):
        rows = enumerate(value, start=1)
        return tuple(_value(inner[0], row, path, f"{where}, number {n}") for n, row in rows)
    if kind is dict and isinstance(value, dict):
        return value
    if origin is Mapping and isinstance(value, dict):
        return {k: _value(inner[1], v, path, f"{where}, {k!r}") for k, v in value.items()}
    if origin in (str, int) and type(value) is origin:
        return value
    raise _misfit(path, where, value, Mapping if kind is dict else origin)


def _misfit(path: Path, where: str, value: object, kind: Any) -> TableError:
    return refusal(path, f"{where} = {reprlib.repr(value)}", _WORDS[kind])
