"""Ways to quantize, of lists on a command line: modes, axes of their options, and recipes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mqo.errors import MqoError
from mqo.launch.options import OPTIONS, split
from mqo.matrix import tables
from mqo.recipes import recipe as recipes

SCHEDULE = "schedule"
_SWITCHES = {"true": True, "false": False}


@dataclass(frozen=True)
class Variant:
    """A way to quantize.

    `name` is for run folders, `rest` what `resolve` takes beside the mode, and `words` are the
    flags with which train_config.py does the same.
    """

    name: str
    mode: str
    rest: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()


def variants(modes: str | None, recipe_list: str = "", axes: Sequence[str] = ()) -> list[Variant]:
    """Return the modes, each with each combination of the axes' values, and then the recipes.

    `modes` None are those that have scripts, beside recipes bf16 alone; '' is none. What quantizes
    nothing has no options, and a recipe its own. `recipe_list` has commas between, each a name or
    a file and what is switched, as in 'nvfp4 without hadamard'.

    Raises:
        MqoError: a text that is no axis or no recipe.
        UnknownNameError: a name that is none.
    """
    if modes is None:
        scripts = ",".join(mode.name for mode in tables.script_modes())
        modes = tables.UNQUANTIZED if recipe_list else scripts
    chosen, names = dict(map(_axis, axes)), tables.expand_modes(modes) if modes else []
    if chosen and not {*names} - {tables.UNQUANTIZED}:
        raise MqoError(
            f"--axis {axes[0]} changes nothing here",
            expected="modes that quantize; a recipe has options of its own",
        )
    made = []
    for mode in names:
        values = [()] if mode == tables.UNQUANTIZED else itertools.product(*chosen.values())
        made += [_of_mode(mode, dict(zip(chosen, these, strict=False))) for these in values]
    return made + [
        _of_recipe(text) for text in filter(None, map(str.strip, recipe_list.split(",")))
    ]


def _of_mode(mode: str, options: Mapping[str, Any]) -> Variant:
    shown = {name: _shown(value) for name, value in options.items()}
    name = "_".join([mode, *(f"{k.replace('_', '-')}-{v}" for k, v in shown.items())])
    rest = {key: value for key, value in options.items() if value not in ((), False)}
    return Variant(name, mode, rest, ("--quantization", mode, *_words(rest)))


def _of_recipe(text: str) -> Variant:
    name, *changes = re.split(r"\s+(without|with)\s+", text)
    pairs = list(zip(changes[::2], changes[1::2], strict=True))
    words = {switch: [what for which, what in pairs if which == switch] for switch, _ in pairs}
    recipe = recipes.changed(recipes.read(name), words.get("without", ()), words.get("with", ()))
    flags = [word for switch, what in pairs for word in (f"--{switch}", what)]
    return Variant(
        recipe.label.replace(" ", "-"),
        tables.UNQUANTIZED,
        {"recipe": recipe, "gemms": "fprop"},
        ("--recipe", name, *flags),
    )


def _axis(text: str) -> tuple[str, list[Any]]:
    """Return an option's name and its values, of 'rounding=nearest-even,stochastic'.

    Values that have commas of their own stand with '|' between.
    """
    name, _, listed = text.partition("=")
    name = name.strip().replace("-", "_")
    tables.check_choice("option of the quantizers for --axis", name, (SCHEDULE, *split(OPTIONS)[0]))
    between = "|" if "|" in listed or name == SCHEDULE else ","
    words = list(dict.fromkeys(word for word in map(str.strip, listed.split(between)) if word))
    if not words:
        raise MqoError(f"--axis {text} has no values", expected="such as rounding=up,down")
    return name, [_value(text, name, word) for word in words]


def _value(axis: str, name: str, word: str) -> Any:
    if name == SCHEDULE or OPTIONS[name].many:
        return () if word == tables.NONE else (word,)
    kind = OPTIONS[name].kind
    if kind is bool:
        if word not in _SWITCHES:
            raise MqoError(f"--axis {axis}: '{word}' is neither", expected="true or false")
        return _SWITCHES[word]
    if kind is int and not word.isdecimal():
        raise MqoError(f"--axis {axis}: '{word}' is no whole number", expected="such as 16,32")
    return int(word) if kind is int else word


def _shown(value: Any) -> str:
    """Return a value for the name of a folder."""
    text = (" ".join(value) or tables.NONE) if isinstance(value, tuple) else str(value).lower()
    return re.sub(r"[^\w.+-]+", "-", text)


def _words(options: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in options.items():
        flag = "--schedule" if name == SCHEDULE else OPTIONS[name].flag
        values = value if isinstance(value, tuple) else (value,)
        for one in values:
            found += [flag] if one is True else [flag, str(one)]
    return found
