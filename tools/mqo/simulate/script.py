"""Read the launcher's arguments in a training script, without running it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from mqo.errors import MqoError
from mqo.untrusted import UntrustedFileError, read_text

# {command line of the launcher: whether it is the one for attention}
FRONT_ENDS = {"train_config.py": False, "flash_attention_config.py": True}
COMMAND = "train"  # of mqo
_PASSED_ON = {"$@", "${@}"}


def arguments(script: Path) -> tuple[list[str], bool]:
    """Return the launcher's arguments in a script, and whether it uses attention's front end.

    A script that is itself a front end has no arguments, and neither has `train`.

    Raises:
        MqoError: there is no such file, or no line starts the launcher with plain words.
    """
    if str(script) == COMMAND:
        return [], False
    if script.name in FRONT_ENDS:
        return [], FRONT_ENDS[script.name]
    try:
        text = read_text(script)
    except UntrustedFileError as error:
        raise _unreadable(script, error.fault) from None
    for line in re.sub(r"\\\n", " ", text).splitlines():
        if line.lstrip().startswith("#"):
            continue
        try:
            words = shlex.split(line)
        except ValueError:
            continue
        names = [word.rpartition("/")[2] for word in words]
        for at, name in enumerate(names):
            if name in FRONT_ENDS or names[max(0, at - 1) : at + 1] == ["mqo", COMMAND]:
                own = [argument for argument in words[at + 1 :] if argument not in _PASSED_ON]
                if strange := [argument for argument in own if "$" in argument or "`" in argument]:
                    raise _unreadable(script, f"uses {strange[0]} of the shell")
                return own, FRONT_ENDS.get(name, False)
    raise _unreadable(script, "does not start a launcher")


def _unreadable(script: Path, why: str) -> MqoError:
    return MqoError(
        f"{script} {why}",
        expected="a script that calls `mqo train`, train_config.py or flash_attention_config.py "
        "with plain words, as in script/; or `train` or one of these two, followed by its options",
    )
