"""Convert a run's command to shell text and back, and read upstream's flags in it."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from mqo.errors import LayoutError
from mqo.run_records import damaged
from mqo.runs import RunFolder
from mqo.untrusted import read_text

_JOIN = " \\\n  "


def as_shell(command: list[str], env: Mapping[str, str]) -> str:
    """Return the command as shell text to paste: variables first, then one flag per line."""
    lines = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    for word in command:
        if word.startswith("--") or word == command[0]:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return _JOIN.join(lines)


def from_shell(text: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and the variables of a command.sh, the inverse of `as_shell`."""
    words = shlex.split(text.replace(_JOIN, " "), comments=True)
    names = list(itertools.takewhile(lambda word: re.match(r"[A-Za-z_]\w*=", word), words))
    return words[len(names) :], dict(name.split("=", 1) for name in names)


def command_of(run: RunFolder) -> tuple[list[str], dict[str, str]]:
    """Return a run's command and its variables; RunError if its command.sh is damaged."""
    try:
        return from_shell(read_text(run.command))
    except ValueError as error:
        raise damaged(run.command, error) from error


def flag_words(words: Sequence[str]) -> dict[str, list[str]]:
    """Return {flag: its values} of flags; the last mention counts.

    Both spellings are read: `--flag value` and `--flag=value`. A switch has no value.
    """
    table: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            values = table[name] = [value] if equals else []
        else:
            values.append(word)
    return table


def flag_table(words: Sequence[str]) -> dict[str, str]:
    """Return {flag: its values, joined by spaces}, as read by `flag_words`."""
    return {name: " ".join(values) for name, values in flag_words(words).items()}


def is_number(word: str) -> bool:
    """Return whether a word is a number, such as a weight in the list of --data-path."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def read_flags(flags: Sequence[str], wanted: Mapping[str, Any]) -> argparse.Namespace:
    """Return the values of some of upstream's flags; the last occurrence counts, as in upstream.

    `wanted` is {flag: its default}: False for a switch, or a type if there is no default.

    Raises:
        LayoutError: a value is missing, or is not a number.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, default in wanted.items():
        options: dict[str, Any] = {"type": type(default), "default": default}
        if default is False:
            options = {"action": "store_true"}
        elif isinstance(default, type):
            options = {"type": default}
        parser.add_argument(f"--{name}", **options)
    try:
        return parser.parse_known_args(list(flags))[0]
    except argparse.ArgumentError as error:
        raise LayoutError(str(error), expected="a number after the flag") from error


def without_flag(command: Sequence[str], flag: str) -> list[str]:
    """Return the command without any mention of `flag` and its value, in either spelling."""
    kept = [word for word in command if not word.startswith(f"{flag}=")]
    while flag in kept:
        at = kept.index(flag)
        del kept[at : at + 2]
    return kept
