"""`mqo adopt`: replace the hand-made quantization sites of a fork by those of the patches."""

from __future__ import annotations

from typing import Annotated

import typer

from mqo.commands.options import (
    FormatsOption,
    JsonOption,
    TreeOption,
    patch_series,
    settled,
)
from mqo.terminal import emit


def adopt(
    yes: Annotated[bool, typer.Option("--yes", help="Do it; by default it is only shown.")] = False,
    formats: FormatsOption = None,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Replace hand-made quantization sites by those of the patches, with the same types."""
    from mqo.launch.own_types import OwnTypes
    from mqo.overlay.quant_types import adopt as overlay

    OwnTypes.from_options(formats)  # before literals are read
    fork, series = settled(tree), patch_series()
    if not yes:
        plan = overlay.planned(fork, series)
        facts = {"types": plan.types, "cuts": plan.cuts, "version": plan.version}
        lines = [*plan.lines(), "nothing was written; --yes does this"]
        emit("adopt", facts, "\n".join(lines), as_json)
        return
    outcome = overlay.adopt(fork, series)
    types = " ".join(f"{site}={value}" for site, value in outcome.types.items())
    lines = [f"adopted on the branch {overlay.BRANCH}: {types}", "to undo it:"]
    emit("adopt", outcome, "\n".join([*lines, *(f"  {text}" for text in outcome.undo)]), as_json)
