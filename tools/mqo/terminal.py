"""Print the outcome of a command as text or JSON, and its errors as text with an exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mqo import process
from mqo.errors import FULL, DiskFullError, FileError, MqoError, is_full
from mqo.megatron.run.files import jsonable
from mqo.untrusted import UntrustedFileError

SCHEMA = 1
MARK = "mqo: "  # begins an error


def guarded(command: Callable[[], Any], name: str = "mqo") -> None:
    """Run `command`; an MqoError becomes one paragraph on stderr and its exit code.

    So does a file that the system does not let it read or write. With --json among the arguments
    the error is printed as one JSON object, too. Ctrl-C, SIGTERM and SIGHUP end the command
    cleanly, with the exit codes 130, 143 and 129.
    """
    try:
        with process.command():
            _run(command)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        process.drop_output()
    except MqoError as error:
        print(f"{name}: {error}", file=sys.stderr)
        if error.detail:
            print(error.detail.rstrip("\n"), file=sys.stderr)
        try:
            if "--json" in sys.argv:
                print(json.dumps({"schema": SCHEMA, "error": error.as_table()}, indent=1))
            sys.stdout.flush()
        except OSError:  # the output's own disk may be the full one
            process.drop_output()
        sys.exit(error.exit_code)


def _run(command: Callable[[], Any]) -> None:
    try:
        _check_words()
        try:
            command()
        except SystemExit:
            sys.stdout.flush()  # else Python fails to write it at the end
            raise
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module in ("", "mqo", "megatron"):
            raise
        from mqo.extras import missing

        raise missing(module) from error
    except UntrustedFileError as error:
        raise MqoError(error.found, expected=error.expected) from error
    except OSError as error:
        path = error.filename if isinstance(error.filename, str | os.PathLike) else None
        if error.errno in FULL:
            raise DiskFullError(Path(path).parent if path else None) from error
        if path is None:
            raise
        raise FileError(path, error) from error
    except Exception as error:
        if isinstance(error, MqoError) or not is_full(error):
            raise
        raise DiskFullError(None) from error


def _check_words() -> None:
    """Raise MqoError for an argument that is not UTF-8, because output and files may contain it."""
    for word in sys.argv:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise MqoError(f"{word!a} is not UTF-8", expected="arguments in UTF-8") from None


def last_error(output: str) -> str | None:
    """Return the last error that `guarded` printed in a command's output; None without any."""
    errors = [line for line in output.splitlines() if line.startswith(MARK)]
    return errors[-1].removeprefix(MARK) if errors else None


def emit(command: str, outcome: Any, text: str, as_json: bool, **more: Any) -> None:
    """Print `text`, or the outcome and `more` as one JSON object."""
    if not as_json:
        print(text)
        return
    table = {"schema": SCHEMA, "command": command}
    if outcome is not None:
        table |= {"outcome": type(outcome).__name__, **asdict(outcome)}
    print(json.dumps(jsonable(table | more), indent=1, allow_nan=False))
