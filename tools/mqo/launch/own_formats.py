"""The number formats of a user in a run: the files of --formats, and the user's own file.

The launcher reads the files. A run keeps the rows of the formats that it uses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mqo.errors import FormatError
from mqo.matrix import tables
from mqo.quant.own_formats import (
    OWN,
    FormatRow,
    OwnFormat,
    check_same,
    own_formats,
    register,
    users_file,
)
from mqo.untrusted import read_toml, reading

HELP = "`mqo formats check FILE` says what is wrong with each row"


def declare_format_files(files: Iterable[Path]) -> dict[Path, tuple[str, ...]]:
    """Make the formats of files, and those of `users_file`, types; return each file's names.

    A row of a given file takes the place of one in `users_file` with the same name.

    Raises:
        FormatError: a file is missing or has an invalid row, or two given files define a format in
            two ways.
    """
    if (own := users_file()).is_file():
        register(_read(own).values())
    chosen: dict[str, OwnFormat] = {}
    names: dict[Path, tuple[str, ...]] = {}
    for file in files:
        read = _read(file)
        try:
            check_same(read, chosen)
        except ValueError as error:
            raise FormatError(f"{file}: {error}", expected="one row, or two names") from None
        chosen |= read
        names[file] = tuple(read)
    for file, defined in names.items():
        _check_names(file, defined, chosen)  # a mode of a type in another file, too
    register(chosen.values())
    return names


def _read(file: Path) -> dict[str, OwnFormat]:
    """Return the formats of a file; FormatError if it cannot be read, or a row is invalid."""
    path = file.resolve()
    with reading(FormatError):
        content = read_toml(file)
    try:
        read = own_formats(content, str(path), path)
    except ValueError as error:
        raise FormatError(f"{file}: {error}", help=HELP) from None
    _check_names(file, read, read)
    return read


def _check_names(file: Path, names: Iterable[str], types: Collection[str]) -> None:
    """Raise FormatError if a format of a file would share a name with a mode."""
    for name in names:
        if fault := clash(name, types):
            raise FormatError(f"{file}: {fault}", help=HELP)


def clash(name: str, names: Collection[str]) -> str:
    """Return the fault of a format that would share a name with a mode, or ''.

    `names` are those of the formats that become types with it.
    """
    mode = tables.clash(name, {*tables.quant_types(), *names})
    return f"formats.{name}: '{mode}' is the name of a mode; valid: another name" if mode else ""


def own_rows() -> dict[str, FormatRow]:
    """Return the formats of the user that are types now."""
    return {name: own.row for name, own in OWN.items()}


def used_formats(
    rows: Mapping[str, FormatRow], types: Collection[str] | None
) -> dict[str, FormatRow]:
    """Return the rows of formats among these types; all if the types are not known yet."""
    return {name: row for name, row in rows.items() if types is None or name in types}


def format_rows(rows: Mapping[str, FormatRow]) -> dict[str, dict[str, Any]]:
    """Return [formats] of quant.toml."""
    return {name: row.as_table() for name, row in rows.items()}


def declare_formats(rows: Any) -> dict[str, FormatRow]:
    """Make the formats of a run's record types, and return them; ValueError if it is damaged."""
    read = TypeAdapter(dict[str, FormatRow]).validate_python(rows)
    for name, row in read.items():
        if fault := clash(name, read):  # a foreign run could redefine a mode
            raise ValueError(fault)
        row.declare(name)
    return read
