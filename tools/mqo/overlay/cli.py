"""The overlay's commands: options in, an outcome out, as text or as JSON.

Exit codes: 0 fine, 1 something differs or needs action, 2 an error, after which nothing is changed.
Libraries are imported inside the commands: the read-only ones start fast.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mqo.display import stderr
from mqo.errors import OverlayError
from mqo.overlay.verify.cli import verify
from mqo.project import Project
from mqo.terminal import JsonOption, emit

if TYPE_CHECKING:
    from mqo.overlay.series import Series
    from mqo.overlay.tree import Tree

TreeOption = Annotated[
    Path | None, typer.Option("--tree", help="The Megatron tree; by default Megatron-LM/.")
]
Names = Annotated[list[str] | None, typer.Argument(help="Entries of the series; by default all.")]
Force = Annotated[
    bool, typer.Option("--force", help="Overwrite hand edits; a copy is kept in .mqo/kept.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for command in (vendor, apply, restore, status, diff, verify, snapshot):
        app.command()(command)


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
    chosen = {"version": version, "source": source, "force": force}
    outcome = overlay.vendor(settled(tree), pin, project.cache, **chosen, report=stderr())
    match outcome:
        case overlay.Vendored():
            text = f"vendored megatron-core {outcome.version}: {outcome.files} files\n"
        case overlay.AlreadyVendored():
            text = f"nothing to do: megatron-core {outcome.version} is in place\n"
    emit("vendor", outcome, f"{text}from {outcome.origin}", as_json)


def apply(
    names: Names = None, force: Force = False, as_json: JsonOption = False, tree: TreeOption = None
) -> None:
    """Apply the patch series, or the named entries with what they require."""
    from mqo.overlay import apply as overlay

    outcome = overlay.apply(settled(tree), _series(), names or (), force=force)
    match outcome:
        case overlay.Applied(changed, entries, not_placed, kept):
            lines = [f"applied {', '.join(entries)}: {changed} files written"]
            lines += [f"not placed, since upstream has its own: {path}" for path in not_placed]
            lines += [f"kept a copy of a hand edit: {path}" for path in kept]
        case overlay.AlreadyApplied(files):
            lines = [f"nothing to do: applied already ({files} files)"]
    emit("apply", outcome, "\n".join(lines), as_json)


def restore(
    names: Names = None, force: Force = False, as_json: JsonOption = False, tree: TreeOption = None
) -> None:
    """Restore upstream's files, or undo only the named entries."""
    from mqo.overlay import apply as overlay

    outcome = overlay.restore(settled(tree), _series(), names or (), force=force)
    match outcome:
        case overlay.Restored(changed, entries, remaining, kept):
            lines = [f"restored {', '.join(entries)}: {changed} files written"]
            lines += [f"still applied: {', '.join(remaining)}"] if remaining else []
            lines += [f"kept a copy of a hand edit: {path}" for path in kept]
        case overlay.AlreadyPristine():
            which = "none of these patches" if names else "no patch"
            lines = [f"nothing to do: {which} is applied"]
    lines += [f"left as it is, changed by hand: {path}" for path in outcome.left]
    emit("restore", outcome, "\n".join(lines), as_json)


def status(as_json: JsonOption = False, tree: TreeOption = None) -> None:
    """Show the version, the patches, hand edits, and the quant types; exit 1 if action is due."""
    from mqo.overlay.status import status as read

    now = read(settled(tree), _series())
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


def diff(
    names: Names = None,
    stat: Annotated[bool, typer.Option("--stat", help="Show only counts.")] = False,
    all: Annotated[bool, typer.Option("--all", help="Also show codemods in full.")] = False,
    export: Annotated[
        Path | None,
        typer.Option(
            help="Write one patch file per entry to this new folder, outside of this checkout."
        ),
    ] = None,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Show what differs from upstream (then exit 1): site patches in full, codemods as counts."""
    from mqo.overlay import diff as overlay

    place, series = settled(tree), _series()
    if export:
        from mqo.overlay.export import export as write

        files = write(place, series, names or (), export, repository=Project.here().root)
        listed = [str(path) for path in files]
        emit("diff", None, "\n".join(listed), as_json, exported=listed)
        return
    changes = overlay.changes(place, series, names or ())
    text = overlay.lines(series, changes, "stat" if stat else "full" if all or names else "short")
    rows = [asdict(change) | {"text": change.text} for change in changes]
    emit("diff", None, "\n".join(text), as_json, changes=rows)
    raise typer.Exit(1 if changes else 0)


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
    shot = take(settled(tree), target, types=types, without=tuple(without or ()), series=_series())
    said = " ".join(f"{site}={value}" for site, value in shot.types.items()) or "no quant sites"
    emit("snapshot", None, f"{target}: {said}", as_json, folder=str(target), types=shot.types)


def root_of(path: Path | None) -> Path:
    """Return the folder of the tree that --tree names."""
    return (path or Project.here().tree).resolve()


def settled(path: Path | None) -> Tree:
    """Return the tree that --tree names, once what a killed command left there is in order."""
    from mqo.overlay.tree import Tree

    tree = Tree(root_of(path))
    tree.settle()
    return tree


def _series() -> Series:
    from mqo.overlay.series import Series

    return Series.of(Project.here())


def _pair(text: str) -> tuple[str, str]:
    site, equals, value = text.partition("=")
    if not equals:
        raise OverlayError(f"--type {text} has no '='", expected="SITE=TYPE, such as qk=mxfp8")
    return site, value
