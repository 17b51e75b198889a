"""Define what a family of models is: a class of transformers that Megatron's flags express."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mqo.errors import ConvertError
from mqo.matrix.tables import Shape

Values = dict[str, tuple[Any, ...]]
Table = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture of transformers, and how its config.json describes a shape.

    fixed: {key: values that a model may have}; a missing key has the first value.
    defaults: {key: value of a missing key}, of the keys that `read` needs.
    read: return the fields of the shape that only this family has, from config.json.
    write: return the keys of config.json that only this family has, from a shape.
    expresses: return whether config.json of this architecture can describe a shape.
    read_keys: keys that `read` uses, in addition to those of `fixed` and `defaults`.
    ignored_keys: keys that affect logits in another family, but not in this one.
    rope_kinds: types of the rotary scaling that upstream expresses for this family.
    tokenizer_class: the class that transformers reads any tokenizer with, "" for the folder's own.
    """

    architecture: str
    model_type: str
    fixed: Values
    read: Callable[[Table], dict[str, Any]]
    write: Callable[[Shape], dict[str, Any]]
    expresses: Callable[[Shape], bool]
    rope_kinds: tuple[str, ...]
    defaults: Table = field(default_factory=dict)
    read_keys: frozenset[str] = frozenset()
    ignored_keys: frozenset[str] = frozenset()
    tokenizer_class: str = ""

    def with_defaults(self, config: Table) -> dict[str, Any]:
        """Return config.json with the defaults of its missing keys."""
        return {**self.defaults, **config}


def refuse_others(where: str, table: Table, only: Values) -> None:
    """Raise ConvertError for a key whose value is not one of those in `only`."""
    for name, values in only.items():
        value = table.get(name, values[0])
        if value not in values:
            raise ConvertError(
                f"{where} has {name} = {value!r}",
                expected=" or ".join(map(repr, values)),
                help="Other values cannot be converted",
            )


def read_names(table: Table, names: Mapping[str, str]) -> dict[str, Any]:
    """Return {field of the shape: value} of a table, by {field: key}."""
    return {ours: table[theirs] for ours, theirs in names.items()}


def write_names(part: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Return {key: value} of a part of a shape, by {field: key}."""
    return {theirs: getattr(part, ours) for ours, theirs in names.items()}
