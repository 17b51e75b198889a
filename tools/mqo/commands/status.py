"""`mqo status`: show the state of the tree; exit with 1 if action is due."""

from __future__ import annotations

import typer

from mqo.commands.options import JsonOption, TreeOption, patch_series, settled
from mqo.terminal import emit


def status(as_json: JsonOption = False, tree: TreeOption = None) -> None:
    """Show the version, the patches, hand edits, and the quant types; exit 1 if action is due."""
    from mqo.overlay.status import status as read

    now = read(settled(tree), patch_series())
    lines = [f"megatron-core {now.version}", f"from {now.origin}"]
    if now.unsupported:
        known = f"the patch series is for megatron-core {now.unsupported}"
        lines.append(f"not supported: {known}; `mqo verify --tree` tries it on this version")
    width = max((len(entry.name) for entry in now.entries), default=0)
    for entry in now.entries:
        count = f"{entry.files} file{'s' * (entry.files > 1)}" if entry.files else ""
        lines.append(f"  {entry.name:{width}} {entry.kind:7} {entry.state:12} {count}".rstrip())
    lines += [f"  changed by hand: {path}" for path in now.edited]
    for path, literal in now.types:
        lines.append(f"  {literal.site:6} {literal.value:8} {path}:{literal.line}")
    emit("status", now, "\n".join(lines), as_json, clean=now.clean)
    raise typer.Exit(0 if now.clean else 1)
