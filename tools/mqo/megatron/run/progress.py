"""Tells the program that started this one how far its work is."""

import json
import os
from pathlib import Path

PLACE = "MQO_PROGRESS"


def advance(what: str, done: int, total: int) -> None:
    """Report that `done` of `total` are done. `what` names the unit, or the stage that starts.

    The file that MQO_PROGRESS names holds the last call; without that variable nothing is written.
    """
    if place := os.environ.get(PLACE):
        facts = {"what": what, "done": done, "total": total}
        Path(place).write_text(json.dumps(facts), encoding="utf-8")
