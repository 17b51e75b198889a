"""Turn the options of a run into command-line flags, checked values and quant.toml.

tools/mqo/quant/options.py defines them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator

from mqo.errors import MqoError
from mqo.matrix.tables import ATTENTION_SITES, LINEAR_SITES, NONE, SITES, check_choice
from mqo.quant import options

ENVIRONMENT_VARIABLE = options.ENVIRONMENT_VARIABLE
OPTIONS: Mapping[str, Any] = options.OPTIONS  # by name
SWITCHES = {"true": True, "false": False}  # words for a bool
# Names in a schedule for all quantized sites of a kind.
GROUPS = {"linear": LINEAR_SITES["all"], "attention": ATTENTION_SITES}


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    # An empty value, and keeping all checkpoints, are defaults.
    chosen = {k: v for k, v in given.items() if v != () and (k, v) != ("keep_checkpoints", 0)}
    listed = {k: list(v) if isinstance(v, tuple) else v for k, v in chosen.items()}
    try:
        options.check(listed)
    except ValueError as error:
        raise MqoError(str(error)) from None
    return listed


# The chosen values by name; other options have their defaults.
Chosen = Annotated[dict[str, Any], AfterValidator(_checked)]


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options for how a run quantizes, and those for what it records."""
    tables = ("quantizer", "layers")
    quantization = {k: v for k, v in given.items() if OPTIONS[k].table in tables}
    return quantization, {k: v for k, v in given.items() if k not in quantization}


def add_arguments(group: argparse._ArgumentGroup, options: Iterable[Any]) -> None:
    """Add the flags of some options."""
    for option in options:
        shown = option.shown or option.default
        default = "" if option.many or shown is False else f" (default: {shown})"
        more: dict[str, Any] = {"action": "store_const", "const": True}
        if option.kind is not bool:
            more = {"type": whole if option.kind is int else str, "metavar": option.metavar}
            more |= {"choices": option.valid or None}
            more |= {"action": "append"} if option.many else {}
        text = option.help + (", repeatable" if option.many else "") + default
        group.add_argument(option.flag, dest=option.name, help=text, **more)


def whole(text: str) -> int:
    """Return a whole number of 0 or more, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number")
    return int(text)


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the arguments set."""
    options = {name: getattr(args, name) for name in OPTIONS}
    return {name: value for name, value in options.items() if value is not None}


def quant_toml(
    types: Mapping[str, str],
    options: Mapping[str, Any],
    schedule: Iterable[str] = (),
    operands: Mapping[str, Mapping[str, Any]] | None = None,
    rules: Iterable[Mapping[str, Any]] = (),
    recipes: Mapping[str, Mapping[str, Any]] | None = None,
    formats: Mapping[str, Mapping[str, Any]] | None = None,
    plugins: Mapping[str, Mapping[str, Any]] | None = None,
) -> str:
    """Return quant.toml: the types of a run's source, which the guard checks, and its options.

    `operands`, `rules`, `recipes`, `formats` and `plugins` are the rows of its tables with these
    names.

    Raises:
        MqoError: `schedule` names an unknown site, a site twice, or a kind without a quantized
            site.
    """
    tables: dict[str, dict[str, Any]] = {"asked": dict(types), "quantizer": {}}
    tables["schedule"] = schedules(types, schedule)
    tables["formats"] = dict(formats or {})
    tables["plugins"] = dict(plugins or {})
    tables["recipes"] = dict(recipes or {})
    tables["operands"] = {name: row for name, row in (operands or {}).items() if row}
    for name, option in OPTIONS.items():
        if name in options:
            tables.setdefault(option.table, {})[name] = options[name]
    lines = ["# What this run quantizes; its guard stops it if a site runs differently."]
    for name, table in tables.items():
        if table or name == "asked":
            lines += [f"[{name}]", *(f"{toml_key(k)} = {toml_value(v)}" for k, v in table.items())]
    for rule in rules:
        lines += ["[[rules]]", *(f"{k} = {toml_value(v)}" for k, v in rule.items())]
    return "\n".join(lines) + "\n"


def toml_key(name: str) -> str:
    """Return a key as TOML."""
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name)


def toml_value(value: Any) -> str:
    """Return a value as TOML; strings, numbers and lists of strings look the same in JSON."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{toml_key(k)} = {toml_value(v)}' for k, v in value.items())} }}"
    return json.dumps(value, ensure_ascii=False)


def schedules(types: Mapping[str, str], given: Iterable[str]) -> dict[str, str]:
    """Return {site: schedule} of 'SITE: schedule' texts; raises what `quant_toml` raises."""
    result: dict[str, str] = {}
    for text in given:
        name, _, phases = (part.strip() for part in text.partition(":"))
        check_choice("GEMM site or kind of them", name, (*SITES, *GROUPS))
        sites = (name,)
        if name in GROUPS:
            sites = tuple(site for site in GROUPS[name] if types.get(site, NONE) != NONE)
        if not sites:
            raise MqoError(
                f"The schedule '{text}' changes nothing: the mode quantizes no {name} site",
                help=f"Name a site, one of {', '.join(GROUPS[name])}, or choose another mode",
            )
        for site in sites:
            if site in result:
                raise MqoError(f"There are two schedules for {site}", expected="one per site")
            result[site] = phases
    return result
