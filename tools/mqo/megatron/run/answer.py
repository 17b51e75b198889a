"""Call a function of a program in a Megatron tree, for `mqo.program.call`.

    python answer.py PROGRAM FUNCTION REQUEST ANSWER

REQUEST is a JSON file of the function's arguments by name, which are checked and converted to the
types of its parameters. Its result is written to ANSWER, as JSON; values that JSON cannot
represent are written as text. A user-correctable error is written to the file that MQO_FAILURE
names.
"""

import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Names of the classes of user-correctable errors: to import all of them takes torch and Megatron.
CORRECTABLE = {"InferenceError", "CheckpointError", "GuardError", "QuantizerError"}


class AbsentError(Exception):
    """A program lacks a function."""


def main(program: Path, function: str, request: Path, answer: Path) -> None:
    """Write the function's answer to the request."""
    root = program.resolve().parents[1]
    # Not the program's folder: numba would import its coverage.py as the package.
    sys.path[:1] = [str(root / ".mqo_runtime"), str(root)]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    from pydantic import PydanticUserError, ValidationError, validate_call

    from mqo.megatron.run.errors import InferenceError, leave

    arguments = json.loads(request.read_text(encoding="utf-8"))
    try:
        result = validate_call(loaded(program, function))(**arguments)
    except Exception as error:
        unlike = isinstance(error, ValidationError) and error.title == function
        if unlike or isinstance(error, (AbsentError, PydanticUserError)):
            error = InferenceError(
                f"{program} is a program of another version of mqo",
                "those of this version",
                f"Run `mqo apply --tree {shlex.quote(str(root))}`",
            )
        elif CORRECTABLE.isdisjoint(kind.__name__ for kind in type(error).__mro__):
            raise
        leave(error)
    answer.write_text(json.dumps(result, default=str), encoding="utf-8")


def loaded(program: Path, function: str) -> Callable[..., Any]:
    """Return a function of a program, which is imported under a name that no package has.

    Raise AbsentError if it has no such function.
    """
    spec = importlib.util.spec_from_file_location(f"{program.stem}_program", program)
    assert spec is not None and spec.loader is not None  # it is a file of Python
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    answers: Callable[..., Any] | None = getattr(module, function, None)
    if answers is None:
        raise AbsentError(f"{program} has no function {function}")
    return answers


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
