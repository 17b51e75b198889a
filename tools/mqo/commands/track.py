"""`mqo track`: send runs to an experiment tracker."""

from __future__ import annotations

import os
import select
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mqo.errors import MqoError

if TYPE_CHECKING:
    from mqo.runs import RunFolder

EVERY_S = 1


def track(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of them.")
    ],
    tracker: Annotated[str, typer.Option(help="wandb or mlflow.")],
    live: Annotated[
        bool, typer.Option("--live", hidden=True, help="Follow a run until stdin is closed.")
    ] = False,
) -> None:
    """Send runs that have ended, successfully or not, to an experiment tracker.

    Data that the tracker already has is not sent again.
    """
    from mqo.track.session import check, find
    from mqo.track.session import track as send

    check(tracker)
    if live:
        os.nice(5)  # the training comes first
    for run in find(runs):
        where = send(run, tracker, _draw, _is_followed if live else None)
        print(where if live else f"{run.root.name}: {where}", flush=True)


def _is_followed() -> bool:
    """Wait a little; return whether the launcher still holds its end of stdin."""
    return not select.select([sys.stdin], [], [], EVERY_S)[0]


def _draw(run: RunFolder, folder: Path) -> list[Path]:
    """Draw the pictures of a run that a tracker shows, where the run has the data."""
    try:
        from mqo.report import pictures
    except ImportError:  # the extra `report` is not installed
        return []
    drawn = []
    for name, draw in (("loss", pictures.plot), ("operands", pictures.plot_operands)):
        with suppress(MqoError, ImportError, ValueError, KeyError):  # also for a damaged run
            draw([run], folder / f"{name}.png")
            drawn.append(folder / f"{name}.png")
    return drawn
