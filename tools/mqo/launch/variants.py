"""Expand lists of modes, axes of options and recipes into ways to quantize."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

from mqo.errors import MqoError
from mqo.launch.effects import PATTERNS, quant_config, unread_options
from mqo.launch.options import OPTIONS, SWITCHES, split
from mqo.launch.own_types import OwnTypes
from mqo.launch.plugins import check_known, chosen_option, shown, split_option
from mqo.matrix import tables
from mqo.quant.plugins import PLUGINS
from mqo.quant.table import unread_patterns, unread_schedules
from mqo.recipes import recipe as recipes
from mqo.recipes.quantizers import declare_file

SCHEDULE = "schedule"


class GemmChoice(NamedTuple):
    """The products that all modes of a command quantize: `--gemms` and `--attention-gemms`."""

    linear: tables.Gemms = "fprop"
    attention: tables.AttentionGemms = "forward"

    @classmethod
    def of_names(cls, linear: str, attention: str) -> GemmChoice:
        """Return the choice of these names; UnknownNameError lists the valid ones."""
        tables.check_choice("choice of GEMMs", linear, get_args(tables.Gemms))
        products = get_args(tables.AttentionGemms)
        tables.check_choice("choice of attention's products", attention, products)
        return cls(cast(tables.Gemms, linear), cast(tables.AttentionGemms, attention))

    @property
    def fields(self) -> dict[str, str]:
        """Return the choice as arguments of `resolve`."""
        return {"gemms": self.linear, "attention_gemms": self.attention}

    @property
    def words(self) -> list[str]:
        """Return the flags of `mqo train` for what is not the default."""
        usual = GemmChoice().fields
        chosen = {name: value for name, value in self.fields.items() if value != usual[name]}
        return [word for name, value in chosen.items() for word in (_flag(name), value)]

    def types(self, mode: str, rest: Mapping[str, Any]) -> dict[str, str]:
        """Return {site: type} of a mode; a variant's `rest` overrides the choice."""
        chosen = {**self.fields, **rest}
        return tables.modes()[mode].types(chosen["gemms"], chosen["attention_gemms"])

    def refuse_unread(self, ways: Sequence[Variant]) -> None:
        """Raise MqoError if a choice changes none of the variants."""
        for name, kind in (("gemms", "linear layers"), ("attention_gemms", "attention")):
            value, usual = self.fields[name], GemmChoice().fields[name]
            if value != usual and all(way.rest.get(name) == usual for way in ways):
                raise MqoError(
                    f"{_flag(name)} {value} changes nothing: no mode quantizes {kind}",
                    expected="a mode that does; a recipe has a type for each GEMM",
                )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


FORWARD = GemmChoice()


@dataclass(frozen=True)
class Variant:
    """A way to quantize.

    `name` is for run folders, `rest` the other arguments of `resolve`, and `words` the equivalent
    flags of `mqo train`.
    """

    name: str
    mode: str
    rest: Mapping[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()


def variants(
    modes: str | None,
    recipe_list: str = "",
    axes: Sequence[str] = (),
    gemms: GemmChoice = FORWARD,
) -> list[Variant]:
    """Return the modes with each combination of the axes' values, and then the recipes.

    `modes` None means those that have scripts, or only bf16 if there are recipes; '' means none. A
    mode that does not read an axis appears once, without it. Axes do not apply to recipes. An axis
    is an option of all quantizers, or QUANTIZER.OPTION of a custom quantizer that is a type.
    `recipe_list` is separated by commas; each item is a name or a file, with its changes, as in
    'nvfp4 without hadamard'.

    Raises:
        MqoError: a text is not an axis or not a recipe, two axes are of the same option, or no mode
            reads an axis.
        UnknownNameError: a name is unknown.
    """
    if modes is None:
        scripts = ",".join(mode.name for mode in tables.script_modes())
        modes = tables.UNQUANTIZED if recipe_list else scripts
    chosen, names = _axes(axes), tables.expand_modes(modes) if modes else []
    read: dict[str, set[str]] = {mode: _read_axes(mode, chosen, gemms) for mode in names}
    for name, text in zip(chosen, axes, strict=True):
        if not any(name in axes_read for axes_read in read.values()):
            raise MqoError(
                f"--axis {text} changes nothing in the modes {', '.join(names) or '(none)'}",
                expected="modes whose operands read it; a recipe sets its own options",
            )
    result: dict[tuple, Variant] = {}
    for mode in names:
        for values in itertools.product(*chosen.values()):
            options = dict(zip(chosen, values, strict=True))
            options = {k: v for k, v in options.items() if k in read[mode]}
            variant = _of_mode(mode, _read_options(mode, options, gemms))
            result.setdefault((mode, tuple(variant.rest.items())), variant)
    return [*result.values()] + [
        _of_recipe(text) for text in filter(None, map(str.strip, recipe_list.split(",")))
    ]


def check_set_once(axes: Sequence[str], texts: Sequence[str]) -> None:
    """Raise MqoError if an axis sets what --plugin-option sets."""
    names = {axis_name(text) for text in axes}
    for text in texts:
        name, option, _ = split_option(text)
        if f"{name}.{option}" in names:
            raise MqoError(
                f"--plugin-option {text} and --axis both set {name}.{option}",
                expected="one of them",
            )


def with_plugins(ways: Sequence[Variant], own: OwnTypes) -> list[Variant]:
    """Return the variants with the custom quantizers of a command.

    Raises:
        PluginError, UnknownNameError: an option is of a quantizer in no file.
    """
    options = _plugin_options(ways, own)
    return [
        replace(
            way,
            rest={
                **way.rest,
                "plugins": own.plugins,
                "plugin_options": (*options[way.name], *way.rest.get("plugin_options", ())),
            },
        )
        for way in ways
    ]


def _plugin_options(ways: Sequence[Variant], own: OwnTypes) -> dict[str, tuple[str, ...]]:
    """Return {variant: options of the quantizers in its files}; those of a recipe are its own.

    Raises:
        PluginError, UnknownNameError: an option is of a quantizer in no file.
    """
    known: dict[str, set[str]] = {}
    for way in ways:
        recipe = way.rest.get("recipe")
        files = [*own.plugins, *map(Path, recipe.plugins if recipe else ())]
        known[way.name] = {name for file in files for name in declare_file(file)}
    names = {text: split_option(text)[0] for text in own.options}
    for name in names.values():
        check_known(name, sorted(set[str]().union(*known.values())))
    return {
        variant: tuple(text for text, name in names.items() if name in declared)
        for variant, declared in known.items()
    }


def _read_axes(mode: str, axes: Mapping[str, Sequence[Any]], gemms: GemmChoice) -> set[str]:
    """Return the axes that change an operand of the mode at some combination of values."""
    axes_read: set[str] = set()
    for values in itertools.product(*axes.values()):
        options = dict(zip(axes, values, strict=True))
        read = _read_options(mode, options, gemms)
        axes_read |= {name for name in read if options[name] != ()}
    return axes_read


def _read_options(mode: str, options: Mapping[str, Any], gemms: GemmChoice) -> dict[str, Any]:
    """Return the options that an operand of the mode reads."""
    types = gemms.types(mode, {})
    schedule = options.get(SCHEDULE, ())
    own = {name for name in options if _is_own(name)}
    chosen = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items() if v != ()}
    chosen = {k: v for k, v in chosen.items() if k != SCHEDULE and k not in own}
    try:
        config = quant_config(types, chosen, schedule)
    except MqoError:  # a schedule of linear layers in a mode of attention
        config, options = quant_config(types, chosen), {**options, SCHEDULE: ()}
        schedule = ()
    unread = set(unread_options(config, chosen))
    for name in PATTERNS:
        patterns = getattr(config, name)
        if patterns and len(unread_patterns(config, name)) == len(patterns):
            unread.add(name)
    if schedule and len(unread_schedules(config)) == len(config.schedule):
        unread.add(SCHEDULE)
    unread |= {name for name in own if name.partition(".")[0] not in config.own_types()}
    return {k: v for k, v in options.items() if k not in unread}


def _of_mode(mode: str, options: Mapping[str, Any]) -> Variant:
    parts = [f"{name.replace('_', '-')}-{_part(value)}" for name, value in options.items()]
    own = tuple(f"{name}={shown(value)}" for name, value in options.items() if _is_own(name))
    rest: dict[str, Any] = {
        name: value
        for name, value in options.items()
        if not _is_own(name) and value not in ((), False)
    }
    words = ["--quantization", mode, *_words(rest)]
    words += [word for text in own for word in ("--plugin-option", text)]
    rest |= {"plugin_options": own} if own else {}
    row = tables.modes()[mode]
    # A choice of GEMMs changes nothing in a mode that quantizes none of its kind.
    if row.linear == tables.NONE:
        rest["gemms"] = FORWARD.linear
    if row.qk == row.pv == tables.NONE:
        rest["attention_gemms"] = FORWARD.attention
    return Variant("_".join([mode, *parts]), mode, rest, tuple(words))


def _of_recipe(text: str) -> Variant:
    name, *changes = re.split(r"\s+(without|with)\s+", text)
    pairs = list(zip(changes[::2], changes[1::2], strict=True))
    words = {switch: [change for which, change in pairs if which == switch] for switch, _ in pairs}
    recipe = recipes.changed(recipes.read(name), words.get("without", ()), words.get("with", ()))
    flags = [word for switch, change in pairs for word in (f"--{switch}", change)]
    return Variant(
        recipe.label.replace(" ", "-"),
        tables.UNQUANTIZED,
        {"recipe": recipe, **FORWARD.fields},
        ("--recipe", name, *flags),
    )


def axis_name(text: str) -> str:
    """Return the option in the text of an axis."""
    return text.partition("=")[0].strip().replace("-", "_")


def _axes(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return {option: values} of the texts of axes."""
    axes: dict[str, list[Any]] = {}
    for text in texts:
        name, values = _axis(text)
        if name in axes:
            raise MqoError(f"There are two --axis of {name}", expected="one with all values")
        axes[name] = values
    return axes


def _axis(text: str) -> tuple[str, list[Any]]:
    """Return the option and the values in a text such as 'rounding=nearest-even,stochastic'.

    Values with commas in them are separated by '|'.
    """
    name, listed = axis_name(text), text.partition("=")[2]
    own = [f"{plugin.name}.{option}" for plugin in PLUGINS.values() for option in plugin.options]
    valid = (SCHEDULE, *split(OPTIONS)[0], *own)
    tables.check_choice("option of the quantizers for --axis", name, valid)
    between = "|" if "|" in listed or name == SCHEDULE else ","
    words = list(dict.fromkeys(word for word in map(str.strip, listed.split(between)) if word))
    if not words:
        raise MqoError(f"--axis {text} has no values", expected="values such as rounding=up,down")
    return name, [_value(text, name, word) for word in words]


def _is_own(name: str) -> bool:
    """Return whether an axis is QUANTIZER.OPTION, of a custom quantizer."""
    return "." in name


def _value(axis: str, name: str, word: str) -> Any:
    if _is_own(name):
        return chosen_option(f"{name}={word}", PLUGINS)[2]
    if name == SCHEDULE or OPTIONS[name].many:
        return () if word == tables.NONE else (word,)
    kind = OPTIONS[name].kind
    if kind is bool:
        if word not in SWITCHES:
            raise MqoError(f"--axis {axis} has the value '{word}'", expected="true or false")
        return SWITCHES[word]
    if kind is int and not word.isdecimal():
        raise MqoError(
            f"--axis {axis} has the value '{word}'", expected="whole numbers such as 16,32"
        )
    return int(word) if kind is int else word


def _part(value: Any) -> str:
    """Return a value for the name of a folder."""
    text = (" ".join(value) or tables.NONE) if isinstance(value, tuple) else shown(value)
    return re.sub(r"[^\w.+-]+", "-", text)


def _words(options: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in options.items():
        flag = "--schedule" if name == SCHEDULE else OPTIONS[name].flag
        values = value if isinstance(value, tuple) else (value,)
        for item in values:
            words += [flag] if item is True else [flag, str(item)]
    return words
