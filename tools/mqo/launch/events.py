"""Copy metrics from TensorBoard's events for upstream's own program, which writes no others."""

from __future__ import annotations

import json
from pathlib import Path

from mqo.megatron.run.files import jsonable
from mqo.runs import RunFolder


def copy_events(tensorboard: Path, folder: RunFolder, since: float) -> None:
    """Write the scalars added to TensorBoard's events `since` (seconds since the epoch).

    Upstream's second plots, over samples, are left out: they repeat the others.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not tensorboard.is_dir():
        return
    # A resumed run repeats iterations, in the TensorBoard folder of the run before.
    events = EventAccumulator(
        str(tensorboard), size_guidance={"scalars": 0}, purge_orphaned_data=False
    )
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.endswith(" vs samples")]
    scalars = [(tag, event) for tag in tags for event in events.Scalars(tag)]
    with folder.metrics.open("w", encoding="utf-8") as lines:
        for tag, event in sorted(scalars, key=lambda row: row[1].wall_time):
            if event.wall_time < since:
                continue
            row = {"iteration": event.step, "name": tag, "value": jsonable(event.value)}
            lines.write(json.dumps(row) + "\n")
