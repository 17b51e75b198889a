"""Number formats of a user: rows of a file with the tables of formats.toml, which become types.

A run records the rows that it uses, so it does not need the file again.
"""

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mqo.quant import formats
from mqo.quant.formats import Format, Minifloat, TaperedFormat, check_choice
from mqo.quant.plugins import PLUGINS, is_name

_TEXTS = ("element", "scale", "rounding", "block_scale", "source", "color", "light", "dark")
_KEYS = {
    **dict.fromkeys((*_TEXTS, "sqnr_reason"), str),
    **{"block": int, "square": bool, "least_sqnr": float},
}
_COLORS = ("color", "light", "dark")
_HEX = re.compile(r"#[0-9a-f]{6}")
# The fields of a format that do not change its numbers.
_TEXT_FIELDS = ("name", "source", *_COLORS, "scripts", "least_sqnr", "sqnr_reason")
VERSION = 6  # digits of a digest in labels


@dataclass(frozen=True)
class FormatRow:
    """A format of a user in the records of a run: in cell.json, and in [formats] of quant.toml.

    Attributes:
        row: its keys and values, as in formats.toml.
        elements: the rows of the user's own elements that it names.
        digest: a hash of what its numbers depend on.
    """

    row: Mapping[str, Any]
    elements: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    digest: str = ""

    @property
    def version(self) -> str:
        """The start of the digest, which names the version in labels."""
        return self.digest[:VERSION]

    def declare(self, name: str) -> None:
        """Make the format a type; ValueError if the row is invalid or its digest differs."""
        tables = {"elements": self.elements, "formats": {name: self.row}}
        own = own_formats(tables, "the file of a user")[name]
        if own.row.digest != self.digest:
            raise ValueError(
                f"formats.{name} has the digest {own.row.version}, and the record says "
                f"{str(self.digest)[:VERSION]}; valid: the row as the run recorded it"
            )
        known = OWN.get(name)
        if known is None or known.row.digest != self.digest:
            register([own])

    def as_table(self) -> dict[str, Any]:
        """Return the row for quant.toml."""
        table = {"row": dict(self.row), "digest": self.digest}
        return table | ({"elements": dict(self.elements)} if self.elements else {})


@dataclass(frozen=True)
class OwnFormat:
    """A format of a user; `file` defines it, or is None for one in the records of a run."""

    format: Format
    row: FormatRow
    file: Path | None = None


OWN: dict[str, OwnFormat] = {}


def register(own: Iterable[OwnFormat]) -> None:
    """Make formats types, in place of older ones of a user with the same names."""
    OWN.update({each.format.name: each for each in own})
    for name, row in _colored().items():
        formats.register_format(row)
        OWN[name] = replace(OWN[name], format=row)


def _colored() -> dict[str, Format]:
    """Return the registered formats with colors, which differ if there are enough of them.

    A format has the same color in each process with the same formats, mostly also with others: its
    name chooses one, and the first of several names with the same one keeps it.
    """
    colored, free = {}, list(formats.OWN_COLORS)
    for name, own in sorted(OWN.items()):
        if own.row.row.get("color"):
            colored[name] = own.format
            continue
        start = int(hashlib.sha256(name.encode()).hexdigest(), 16) % len(formats.OWN_COLORS)
        order = formats.OWN_COLORS[start:] + formats.OWN_COLORS[:start]
        color = next((color for color in order if color in free), order[0])
        free = [other for other in free if other != color]
        colored[name] = replace(
            own.format, color=color["color"], light=color["light"], dark=color["dark"]
        )
    return colored


def users_file() -> Path:
    """Return the file whose formats are types in each command; it need not exist."""
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return (Path(config).expanduser() / "mqo/formats.toml").resolve()


def load_formats(file: str | os.PathLike[str]) -> list[str]:
    """Make the formats of a TOML file types, and return their names.

    The file has the tables [formats] and [elements] of formats.toml; an element is a minifloat or
    an integer. A format that is registered already must have the same numbers.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is not TOML, or a row is invalid; the text names the file and the row.

    Examples:
        >>> row = 'element = "int4"\\nblock = 32\\nscale = "e8m0"\\n'
        >>> _ = Path("mine.toml").write_text("[formats.mine4]\\n" + row)
        >>> load_formats("mine.toml")
        ['mine4']
    """
    path = Path(file).resolve()
    try:
        read = own_formats(tomllib.loads(path.read_text(encoding="utf-8")), str(path), path)
        check_same(read)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    register(read.values())
    return list(read)


def check_same(read: Mapping[str, OwnFormat], known: Mapping[str, OwnFormat] = OWN) -> None:
    """Raise ValueError if a format is known with other numbers."""
    for name, own in read.items():
        if name in known and known[name].row.digest != own.row.digest:
            raise ValueError(
                f"formats.{name}: {known[name].file or 'a run'} defines it in another way"
            )


def own_formats(
    tables: Mapping[str, Any], source: str, file: Path | None = None
) -> dict[str, OwnFormat]:
    """Return the formats of a file's tables; ValueError names the first invalid row.

    `source` is the source of a row that names none.
    """
    rows, faults = read_rows(tables, source)
    if faults:
        raise ValueError(faults[0])
    return {name: OwnFormat(read, _record(tables, name, read), file) for name, read in rows.items()}


def read_rows(tables: Mapping[str, Any], source: str) -> tuple[dict[str, Format], list[str]]:
    """Return the valid formats of a file's tables, and a sentence about each fault.

    `source` is the source of a row that names none.
    """
    faults = []
    for table, rows in tables.items():
        if table not in ("elements", "formats"):
            faults.append(f"unknown table {table!r}; valid: elements, formats")
        elif not isinstance(rows, Mapping) or not all(
            isinstance(row, Mapping) for row in rows.values()
        ):
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


def _record(tables: Mapping[str, Any], name: str, read: Format) -> FormatRow:
    """Return the record of a row, with a digest of what its numbers depend on."""
    row, elements = tables["formats"][name], tables.get("elements", {})
    named = [row[key] for key in ("element", "block_scale") if row.get(key) in elements]
    facts = {key: value for key, value in asdict(read).items() if key not in _TEXT_FIELDS}
    for key in ("element", "block_scale"):
        if facts[key]:
            del facts[key]["name"]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return FormatRow(dict(row), {each: dict(elements[each]) for each in named}, digest)


def _element(name: str, row: Mapping[str, Any]) -> Minifloat | TaperedFormat:
    if name in formats.ELEMENTS:
        raise ValueError(f"elements.{name}: mqo has an element of this name; valid: another name")
    if "widths" in row:
        raise ValueError(f"elements.{name}: a tapered element needs code; valid: a minifloat")
    try:
        return formats.element_of(name, dict(row))
    except (TypeError, ValueError) as error:
        raise ValueError(f"elements.{name}: {error}") from None


def _format(
    name: str,
    row: Mapping[str, Any],
    source: str,
    elements: Mapping[str, Minifloat | TaperedFormat],
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
            valid = (int, float) if _KEYS[key] is float else (_KEYS[key],)
            if type(value) not in valid:
                raise ValueError(f"{key} = {value!r} is not of type {_KEYS[key].__name__}")
        for key in ("element", "scale"):
            if key not in row:
                raise ValueError(f"there is no {key}")
        _check_colors(row)
        # HiFloat4's scales are defined for its own element.
        check_choice("scale", row["scale"], tuple(k for k in formats.SCALE_BYTES if k != "hif4"))
        if row.get("square") and "block" not in row:
            raise ValueError("square needs a block")
        texts = dict.fromkeys(_COLORS, "") | {"source": source}
        return formats.format_of_row(name, texts | dict(row), elements)
    except ValueError as error:
        raise ValueError(f"formats.{name}: {error}") from None


def _check_colors(row: Mapping[str, Any]) -> None:
    given = [key for key in _COLORS if key in row]
    if given and len(given) < len(_COLORS):
        raise ValueError(f"there is no {min({*_COLORS} - {*given})}; valid: color, light and dark")
    for key in given[1:]:
        if not _HEX.fullmatch(row[key]):
            raise ValueError(
                f"{key} = {row[key]!r} is not a color; valid: #rrggbb, in small letters"
            )
    if given and not re.fullmatch(r"[\w ,-]{1,40}", row["color"]):
        raise ValueError(f"color = {row['color']!r} is not the name of a color")
