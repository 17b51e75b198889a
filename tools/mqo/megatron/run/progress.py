"""Report progress to the program that started this one."""

import json
import os
from pathlib import Path

VARIABLE = "MQO_PROGRESS"


def advance(unit: str, done: int, total: int) -> None:
    """Report that `done` of `total` are done; `unit` names the unit, or the stage that starts.

    The file in MQO_PROGRESS has the last report; without that variable nothing is written.
    """
    if path := os.environ.get(VARIABLE):
        facts = {"what": unit, "done": done, "total": total}
        Path(path).write_text(json.dumps(facts), encoding="utf-8")
