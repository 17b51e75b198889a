"""`mqo snapshot`: a read-only copy of the patched tree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mqo.commands.options import JsonOption, TreeOption, patch_series, settled
from mqo.errors import OverlayError
from mqo.terminal import emit


def snapshot(
    target: Annotated[Path, typer.Argument(help="The folder to make.")],
    site_type: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            help="SITE=TYPE, repeatable; other sites get none. By default the tree's types stay.",
        ),
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="A patch to leave out, repeatable.")
    ] = None,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Copy the patched tree, read-only, with quant types of its own."""
    from mqo.overlay.snapshot import snapshot as take

    types = dict(_pair(text) for text in site_type) if site_type else None
    left_out, series = tuple(without or ()), patch_series()
    shot = take(settled(tree), target, types=types, without=left_out, series=series)
    text = " ".join(f"{site}={value}" for site, value in shot.types.items()) or "no quant sites"
    emit("snapshot", None, f"{target}: {text}", as_json, folder=str(target), types=shot.types)


def _pair(text: str) -> tuple[str, str]:
    site, equals, value = text.partition("=")
    if not equals:
        raise OverlayError(f"--type {text} has no '='", expected="SITE=TYPE, such as qk=mxfp8")
    return site, value
