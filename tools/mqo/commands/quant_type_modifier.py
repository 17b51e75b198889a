"""The command line of script/quant_type_modifier.py, which prints a table or JSON."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import textwrap
from collections.abc import Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from mqo import process
from mqo.errors import FULL, DiskFullError, FormatError, MqoError
from mqo.overlay.journal import STORE
from mqo.overlay.quant_types import modifier
from mqo.overlay.quant_types.modifier import Outcome, Report, SiteState
from mqo.overlay.quant_types.sites import ABSENT
from mqo.project import Project
from mqo.quant.formats import QUANT_TYPES
from mqo.quant.own_formats import own_formats, register, users_file

WIDTH = 80
SCHEMA = 1
SITE_HELP = {
    "fprop": "forward GEMM of linear layers",
    "dgrad": "input gradient of linear layers",
    "wgrad": "weight gradient of linear layers",
    "qk": "attention scores",
    "pv": "weighted values of attention",
    "qk_recompute": "attention scores, recomputed in the backward pass",
    "dv": "gradient of attention's values",
    "dp": "gradient of attention's probabilities",
    "dq": "gradient of attention's queries",
    "dk": "gradient of attention's keys",
}
EXIT_CODES = f"""
T is one of {", ".join(QUANT_TYPES)}, or your own format.
Exit codes: 0 done; 1 --check found something that needs action; 2 error, and nothing was changed.
"""


def program() -> NoReturn:
    """Run the program `quant_type_modifier` of an installed wheel; script/ has a clone's."""
    with process.command():
        sys.exit(main())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = _run(options_of(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        process.drop_output()
        return 0
    except OSError as error:
        if error.errno not in FULL:
            raise
        return _fail(DiskFullError(None), arguments)
    except MqoError as error:
        return _fail(error, arguments)


def _fail(error: MqoError, arguments: Sequence[str]) -> int:
    """Print the error, with --json also as JSON, and return the exit code."""
    print(f"quant_type_modifier: {error}", file=sys.stderr)
    try:
        if "--json" in arguments:
            print(json.dumps({"schema": SCHEMA, "error": str(error)}))
        sys.stdout.flush()
    except OSError:  # the output's own disk may be the full one
        process.drop_output()
    return error.exit_code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise MqoError(
            f"The command line is invalid: {message}",
            expected="--check, --restore, or types to set, such as --linear-quant mxfp8",
            help=f"`{modifier.COMMAND} --help` lists the options",
        )


def parser() -> argparse.ArgumentParser:
    """Return the parser; `options_of` checks which options can be combined."""
    options = _Parser(
        prog="quant_type_modifier.py",
        description="Show and set the quant types in Megatron's source.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    options.add_argument("--check", action="store_true", help="show the sites and their types")
    for site, name in modifier.OPTIONS.items():
        options.add_argument(f"--{name}-quant", dest=site, metavar="T", help=SITE_HELP[site])
    options.add_argument(
        "--shared", action="store_true", help="set a literal for all the sites that read it"
    )
    options.add_argument("--restore", action="store_true", help="undo all modifications")
    options.add_argument(
        "--force", action="store_true", help="with --restore: overwrite hand edits, keep a copy"
    )
    options.add_argument("--dry-run", action="store_true", help="print the diff, write nothing")
    options.add_argument("--json", action="store_true", help="print the outcome as JSON")
    own = "TOML file whose formats become types T; repeatable"
    options.add_argument(
        "--formats", type=Path, metavar="FILE", action="append", default=[], help=own
    )
    options.add_argument("--tree", type=Path, help="the Megatron tree; by default Megatron-LM/")
    return options


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; raise MqoError if it is invalid."""
    known = parser()
    options = known.parse_args(arguments)
    options.types = {
        site: getattr(options, site)
        for site in modifier.OPTIONS
        if getattr(options, site) is not None
    }
    commands = [options.check, options.restore, bool(options.types)]
    if sum(commands) != 1:
        known.error("these cannot be combined" if any(commands) else "no command is given")
    if options.shared and not options.types:
        known.error("--shared needs a type to set")
    if options.force and not options.restore:
        known.error("--force needs --restore")
    if options.formats and options.restore:
        known.error("--formats changes nothing with --restore")
    return options


def _load(files: Sequence[Path], types: Set[str]) -> None:
    """Make the formats of files, and of the file in the user's configuration, types.

    Raises:
        FormatError: a file cannot be used, or has none of the types to set.
    """
    from mqo.untrusted import read_toml

    try:
        if (own := users_file()).is_file():
            register(own_formats(read_toml(own), str(own)).values())
        for file in files:
            names = own_formats(read_toml(file), str(file), file)
            register(names.values())
            if types and not types & {*names}:
                raise FormatError(
                    f"--formats {file} changes nothing: no site gets the type {' or '.join(names)}",
                    expected="a type of each file",
                )
    except ValueError as error:
        raise FormatError(
            f"The formats cannot be read: {error}",
            help="`mqo formats check FILE` says what is wrong with each row",
        ) from None


def _run(options: argparse.Namespace) -> int:
    _load(options.formats, {*options.types.values()})
    root = (options.tree or Project.here().tree).resolve()
    if options.check:
        report = modifier.check(root)
        print(json.dumps(_report_json(report), indent=1) if options.json else _table(report))
        return 1 if report.due else 0
    if options.restore:
        command = "restore"
        outcome = modifier.restore(root, force=options.force, dry_run=options.dry_run)
    else:
        command = "modify"
        outcome = modifier.modify(
            root, options.types, shared=options.shared, dry_run=options.dry_run
        )
    if options.json:
        print(json.dumps(_outcome_json(command, outcome, dry_run=options.dry_run), indent=1))
        return 0
    for warning in outcome.warnings:
        print("\n".join(_wrap(f"warning: {warning}", 9)), file=sys.stderr)
    if options.dry_run and outcome.files:
        sys.stdout.buffer.write(outcome.diff)
    else:
        _print_outcome(command, outcome, options)
    return 0


# -- text -----------------------------------------------------------------------------------------


def _table(report: Report) -> str:
    width = max(5, *(len(_shown(state)) for state in report.sites))
    name = max(5, *(len(state.site.name) for state in report.sites))
    lines = [str(report.root), f"{'site':{name}}  {'type':{width}}  where"]
    for state in report.sites:
        lines += _row(state, name, width)
    for kind, texts in (("due", report.due), ("note", report.notes)):
        lines += [line for text in texts for line in _wrap(f"{kind}: {text}", 6)]
    return "\n".join(lines)


def _shown(state: SiteState) -> str:
    """Return the type, followed by the source's unknown values in parentheses."""
    unknown = f" ({', '.join(state.unknown)})" if state.unknown else ""
    return (state.type or ("-" if state.site.note == ABSENT else "?")) + unknown


def _row(state: SiteState, name: int, width: int) -> list[str]:
    """Return one line if the notes fit, else the notes on lines below."""
    site = state.site
    row = f"{site.name:{name}}  {_shown(state):{width}}  {site.path}:{site.line}"
    note = _note(state)
    whole = f"{row}  {note}".rstrip()
    indent = name + 9
    return [whole] if len(whole) <= WIDTH or not note else [row, *_wrap(note, indent, first=indent)]


def _note(state: SiteState) -> str:
    notes = [state.site.note] if state.site.note else []
    notes += [f"shared with {' and '.join(state.site.shares)}"] * bool(state.site.shares)
    notes += [f"was {state.was}"] if state.was is not None else []
    return ", ".join(notes)


def _wrap(text: str, indent: int, first: int = 0) -> list[str]:
    """Return lines of at most WIDTH columns; paths, commands and types stay whole."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=" " * first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _print_outcome(command: str, outcome: Outcome, options: argparse.Namespace) -> None:
    for edit in outcome.edits:
        print(f"{edit.site:5}  {edit.before} -> {edit.after}  {edit.path}:{edit.line}")
    if command == "restore":
        files = sorted(outcome.files)
        print("\n".join(f"restored {f}" for f in files) or "nothing to do: nothing is modified")
        for path in outcome.overwritten:
            print(f"kept a copy of {path} in {outcome.root / STORE}/kept")
    elif not outcome.edits:
        types = ", ".join(f"{site} is {value}" for site, value in options.types.items())
        print(f"nothing to do: {types} already")
    else:
        tree = f" --tree {shlex.quote(str(options.tree))}" if options.tree else ""
        print(f"undo: {modifier.COMMAND} --restore{tree}")


# -- JSON -----------------------------------------------------------------------------------------


def _report_json(report: Report) -> dict:
    return {
        "schema": SCHEMA,
        "command": "check",
        "tree": str(report.root),
        "sites": [_site_json(state) for state in report.sites],
        "due": list(report.due),
        "notes": list(report.notes),
    }


def _site_json(state: SiteState) -> dict:
    site = state.site
    return {
        "site": site.name,
        "type": state.type,
        "values": list(site.values),
        "was": state.was,
        "path": site.path,
        "line": site.line,
        "editable": not site.refusal,
        "shares": list(site.shares),
        "note": _note(state),
        "refusal": site.refusal,
    }


def _outcome_json(command: str, outcome: Outcome, *, dry_run: bool) -> dict:
    return {
        "schema": SCHEMA,
        "command": command,
        "tree": str(outcome.root),
        "dry_run": dry_run,
        "edits": [asdict(edit) for edit in outcome.edits],
        "files": sorted(outcome.files),
        "overwritten": outcome.overwritten,
        "warnings": outcome.warnings,
        "diff": outcome.diff.decode("utf-8", "backslashreplace"),
    }
