"""Read checkpoint_args.toml: every argument of a checkpoint, and how programs use it.

This module needs only the standard library, because `mqo` loads it without torch.
"""

import functools
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("checkpoint_args.toml")
IGNORE_FLAG = "--ignore-argument"

Values = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True)
class ArgsTable:
    """The groups of checkpoint_args.toml, whose header describes them.

    `values` has {argument: allowed values} for every model ("all"), both kinds of attention, and
    models with Mamba layers ("mamba").
    """

    expressed: frozenset[str]
    refused: frozenset[str]
    values: Mapping[str, Values]
    no_effect: Mapping[str, frozenset[str]]
    ranges: Mapping[str, tuple[float, float]]
    taken_groups: frozenset[str]
    read: frozenset[str]
    unsupported: frozenset[str]
    needed: frozenset[str]
    files: frozenset[str]

    @functools.cached_property
    def model(self) -> frozenset[str]:
        """Return the arguments that describe a model."""
        return self.expressed | self.refused | frozenset().union(*self.values.values())

    @functools.cached_property
    def without_effect(self) -> frozenset[str]:
        """Return the arguments on which the logits of given weights do not depend."""
        return frozenset().union(*self.no_effect.values())

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """Return all arguments of the table."""
        return self.model | self.without_effect

    @functools.cached_property
    def taken(self) -> frozenset[str]:
        """Return the arguments that a program takes from a checkpoint to build its model."""
        groups = (self.no_effect[name] for name in self.taken_groups)
        return self.model.union(*groups) - self.unsupported


def _values(rows: Mapping[str, list[Any]]) -> Values:
    return {
        name: tuple(None if value == "None" else value for value in allowed)
        for name, allowed in rows.items()
    }


@functools.cache
def read_table() -> ArgsTable:
    """Return the content of checkpoint_args.toml."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    names = ("expressed", "refused", "read", "unsupported", "needed", "files")
    return ArgsTable(
        **{name: frozenset(rows[name].split()) for name in names},
        values={kind: _values(rows_of_kind) for kind, rows_of_kind in rows["values"].items()},
        no_effect={group: frozenset(text.split()) for group, text in rows["no_effect"].items()},
        ranges={name: (least, most) for name, (least, most) in rows["ranges"].items()},
        taken_groups=frozenset(rows["taken"]),
    )


def is_empty(value: Any) -> bool:
    """Return whether an argument with this value counts as absent."""
    return value is None or value is False or (type(value) in (str, list, dict) and not value)


def unknown_arguments(saved: Mapping[str, Any], ignored: Collection[str] = ()) -> list[str]:
    """Return the names of arguments with a value that the table does not list.

    `ignored` are names that the user ignores. Raises ValueError if the table lists one of them.
    """
    known = read_table().names
    if listed := sorted(set(ignored) & known):
        raise ValueError(f"{IGNORE_FLAG} {listed[0]} is a known argument of this release")
    unknown = (name for name in saved if name not in known and name not in ignored)
    return sorted((name for name in unknown if not is_empty(saved[name])), key=str)
