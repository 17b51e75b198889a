"""`mqo vendor`: put a release of Megatron into the tree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mqo.commands.options import JsonOption, TreeOption, settled
from mqo.display import stderr
from mqo.errors import OverlayError
from mqo.project import Project
from mqo.terminal import emit


def vendor(
    version: Annotated[
        str | None, typer.Option(help="A release that UPSTREAM.toml knows; by default the pin.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="A megatron-core wheel or Megatron-LM checkout.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also replace a patched tree.")] = False,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Fetch the pinned Megatron, check every hash, and put it into the tree."""
    from mqo.overlay import vendor as overlay

    project = Project.here()
    if version and source:
        raise OverlayError("--version and --from were both given", expected="one of them")
    pin = overlay.Pin.load(project.upstream_pin)
    target, say = settled(tree), stderr()
    outcome = overlay.vendor(
        target, pin, project.cache, version=version, source=source, force=force, report=say
    )
    match outcome:
        case overlay.Vendored():
            text = f"vendored megatron-core {outcome.version}: {outcome.files} files\n"
        case overlay.AlreadyVendored():
            text = f"nothing to do: megatron-core {outcome.version} is in place\n"
    emit("vendor", outcome, f"{text}from {outcome.origin}", as_json)
