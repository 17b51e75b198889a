"""Define what a family of models is: a class of transformers that Megatron's flags express."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mqo.errors import ConvertError
from mqo.matrix.tables import Shape

Values = dict[str, tuple[Any, ...]]
Table = Mapping[str, Any]
# {field of the shape: key of config.json}, for reading and writing.
SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "norm_epsilon": "rms_norm_eps",
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture of transformers, and how its config.json describes a shape.

    fixed: {key: values that a model may have}; a missing key has the first value.
    defaults: {key: value of a missing key}, of the keys that `read` needs.
    sizes: {field of the shape: key}, as SIZES.
    read: return the fields of the shape that only this family has, from config.json.
    write: return the keys of config.json that only this family has, from a shape.
    expresses: return whether config.json of this architecture can describe a shape.
    read_keys: keys that `read` uses, in addition to those of `fixed` and `defaults`.
    ignored_keys: keys that affect logits in another family, but not in this one.
    rope_kinds: types of the rotary scaling that upstream expresses for this family; none if it has
        no rotary positions.
    notes: return notes for the user whose weights of this config.json are converted.
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
    sizes: Mapping[str, str] = field(default_factory=lambda: SIZES)
    notes: Callable[[Table], tuple[str, ...]] = lambda config: ()
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
