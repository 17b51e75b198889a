"""Which trained models may be published: what a checkpoint's arguments may say.

published_args.toml lists every argument. One that config.json cannot express must have upstream's
default, else the published folder would describe another model.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from mqo.errors import ConvertError

TABLE = Path(__file__).with_name("published_args.toml")

Names = Annotated[frozenset[str], BeforeValidator(lambda text: _unique(text))]
Values = Annotated[
    Mapping[str, tuple[Any, ...]],
    BeforeValidator(
        lambda table: {
            name: tuple(None if value == "None" else value for value in values)
            for name, values in table.items()
        }
    ),
]


def _unique(text: str) -> frozenset[str]:
    names = text.split()
    if len(set(names)) < len(names):
        raise ValueError("a name is listed twice")
    return frozenset(names)


class _Values(BaseModel):
    """The values that an argument may have: in every model, and in those of one attention."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    all: Values
    grouped: Values
    latent: Values

    @property
    def names(self) -> frozenset[str]:
        """Return all arguments that are listed here."""
        return frozenset(self.all) | frozenset(self.grouped) | frozenset(self.latent)


class PublishedArgs(BaseModel):
    """The table of all arguments; each one is in one group."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    expressed: Names
    refused: Names
    values: _Values
    no_effect: Mapping[str, Names]

    @model_validator(mode="after")
    def _each_once(self) -> PublishedArgs:
        groups = [self.expressed, self.refused, self.values.names, *self.no_effect.values()]
        if len(frozenset().union(*groups)) < sum(map(len, groups)):
            raise ValueError("an argument is in two groups")
        return self

    @property
    def without_effect(self) -> frozenset[str]:
        """Return the arguments on which logits do not depend."""
        return frozenset().union(*self.no_effect.values())

    @property
    def names(self) -> frozenset[str]:
        """Return all arguments of the table."""
        return self.expressed | self.refused | self.values.names | self.without_effect


@functools.cache
def table() -> PublishedArgs:
    """Return the content of published_args.toml."""
    return PublishedArgs(**tomllib.loads(TABLE.read_text(encoding="utf-8")))


class Argument(BaseModel):
    """An argument in upstream's parser: the flag that sets it, and its default."""

    model_config = ConfigDict(frozen=True)
    flag: str
    default: Any


def check_published(args: Mapping[str, Any], parser: Mapping[str, Argument]) -> None:
    """Raise ConvertError if config.json cannot express what a checkpoint's arguments say.

    `parser` has the arguments of the vendored release, by name.
    """
    rows = table()
    latent = bool(args.get("multi_latent_attention"))
    listed = rows.values.all | (rows.values.latent if latent else rows.values.grouped)
    for name, value in args.items():
        if name in listed:
            # Upstream takes several types of load balancing as a list.
            parts = value if isinstance(value, list) else [value]
            fits = all(part in listed[name] for part in parts)
            allowed = " or ".join(map(repr, listed[name]))
        elif name in rows.refused and name in parser:
            fits, allowed = value == parser[name].default, repr(parser[name].default)
        elif name in rows.refused or name not in rows.names:
            fits, allowed = _is_empty(value), "no value"
        else:
            continue
        if not fits:
            flag = f"{parser[name].flag}: " if name in parser else ""
            raise ConvertError(
                f"The checkpoint was trained with {flag}{name} = {value!r}",
                expected=f"{name} = {allowed}: config.json cannot express other values",
                help="`mqo eval` and `mqo generate` run the checkpoint as it is",
            )


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})
