"""The command line: thin commands on the library, and the one place that turns errors into text.

Libraries are imported inside the commands: `mqo --help` and the read-only commands start fast.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from mqo.errors import MqoError, OverlayError
from mqo.overlay.verify_cli import verify
from mqo.project import Project

app = typer.Typer(
    help="Megatron Quant Overlay: patch a vendored Megatron-LM, run it quantised, undo it exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
matrix = typer.Typer(help="The matrix of pretrain scripts.", no_args_is_help=True)
app.add_typer(matrix, name="matrix")
app.command()(verify)
TreeOption = Annotated[
    Path | None, typer.Option("--tree", help="The Megatron tree; by default Megatron-LM/.")
]


def main() -> None:
    """The `mqo` program."""
    guarded(app)


def guarded(command: Callable[[], Any]) -> None:
    """Run `command`; an MqoError becomes one paragraph on stderr and its exit code."""
    try:
        command()
    except MqoError as error:
        print(f"mqo: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


@app.command()
def vendor(
    source: Annotated[
        Path | None, typer.Option("--from", help="A megatron-core wheel or Megatron-LM checkout.")
    ] = None,
    force: Annotated[bool, typer.Option(help="Replace a patched or edited tree.")] = False,
    tree: TreeOption = None,
) -> None:
    """Fetch the pinned Megatron, check every hash, and put it into the tree."""
    from mqo.overlay import vendor as overlay

    project = Project.here()
    pin = overlay.Pin.load(project.upstream_pin)
    outcome = overlay.vendor(_tree(tree), pin, project.cache, source=source, force=force)
    match outcome:
        case overlay.Vendored():
            print(f"vendored megatron-core {outcome.version}: {outcome.files} files")
            print(f"from {outcome.origin}")
        case overlay.AlreadyVendored():
            print(f"megatron-core {outcome.version} is in place, from {outcome.origin}")


@app.command()
def apply(tree: TreeOption = None) -> None:
    """Apply the patch series."""
    from mqo.overlay import apply as overlay

    match overlay.apply(_tree(tree), _series()):
        case overlay.Applied(changed, entries):
            print(f"applied {', '.join(entries)}: {changed} files written")
        case overlay.AlreadyApplied(files):
            print(f"nothing to do: the series is applied ({files} files)")


@app.command()
def restore(tree: TreeOption = None) -> None:
    """Give back upstream's bytes."""
    from mqo.overlay import apply as overlay

    match overlay.restore(_tree(tree)):
        case overlay.Restored(changed):
            print(f"restored {changed} files to upstream's bytes")
        case overlay.AlreadyPristine():
            print("nothing to do: the tree is pristine")


@app.command()
def status(tree: TreeOption = None) -> None:
    """Show the version, the patches, hand edits, and the quant types; exit 1 if action is due."""
    from mqo.overlay.status import status as read

    now = read(_tree(tree), _series())
    print(f"megatron-core {now.version}, from {now.origin}")
    for entry in now.entries:
        count = f"{entry.files} files" if entry.files else ""
        print(f"  {entry.name:18} {entry.kind:6} {entry.state:12} {count}")
    for path in now.edited:
        print(f"  changed by hand: {path}")
    for path, literal in now.types:
        print(f"  {literal.site:6} {literal.value:8} {path}:{literal.line}")
    raise typer.Exit(0 if now.clean else 1)


@app.command()
def diff(
    names: Annotated[list[str] | None, typer.Argument(help="Entries to show in full.")] = None,
    all: Annotated[bool, typer.Option("--all", help="Show sweeps in full, too.")] = False,
    tree: TreeOption = None,
) -> None:
    """Show what differs from upstream: site patches in full, sweeps as counts."""
    from mqo.overlay import report_diff

    for line in report_diff.lines(_tree(tree), _series(), names or [], full=all):
        print(line)


@app.command()
def snapshot(
    target: Annotated[Path, typer.Argument(help="A folder to be made.")],
    site_type: Annotated[
        list[str] | None, typer.Option("--type", help="SITE=TYPE, repeatable; others get none.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(help="A patch to leave out, repeatable.")
    ] = None,
    tree: TreeOption = None,
) -> None:
    """Copy the patched tree, read-only, with quant types of its own."""
    from mqo.overlay.snapshot import snapshot as take

    types = dict(_pair(text) for text in site_type) if site_type else None
    shot = take(_tree(tree), target, types=types, without=tuple(without or ()), series=_series())
    print(f"{target}: " + (" ".join(f"{s}={t}" for s, t in shot.types.items()) or "no quant sites"))


@app.command()
def setup() -> None:
    """Bring about what is missing: the vendored tree, the patches, the sample data."""
    from mqo.data.prepare import prepare
    from mqo.launch.ready import ready_tree

    project = Project.here()
    ready_tree(project, _series(), print, allow_edits=False)
    ready = prepare(project, "wikipedia", report=print)
    print(f"data     : {ready.documents} documents, {ready.tokens:,} tokens of {ready.dataset}")


@app.command()
def plot(
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders; the newest one.")] = None,
    out: Annotated[Path, typer.Option(help="A .png, .svg or .pdf.")] = Path("loss.png"),
) -> None:
    """Draw the loss curves of runs."""
    from mqo.report.curve import plot as draw
    from mqo.runs import RunFolder, latest

    chosen = [RunFolder(path) for path in runs or []] or [latest(Project.here().runs)]
    draw(chosen, out)
    print(out)


@matrix.command()
def generate() -> None:
    """Write the pretrain scripts from the template and the tables."""
    from mqo.matrix.generate import write

    changed = write(Project.here().root / "script")
    print("\n".join(map(str, changed)) or "nothing to do: all scripts are as generated")


@matrix.command(name="list")
def list_names() -> None:
    """List models, datasets, modes and training configurations."""
    from mqo.launch.cli import listing

    print(listing())


def _tree(path: Path | None) -> Any:
    from mqo.overlay.tree import Tree

    return Tree((path or Project.here().tree).resolve())


def _series() -> Any:
    from mqo.overlay.series import Series

    return Series.load(Project.here().patches)


def _pair(text: str) -> tuple[str, str]:
    site, equals, value = text.partition("=")
    if not equals:
        raise OverlayError(f"--type {text} has no '='", expected="SITE=TYPE, such as qk=mxfp8")
    return site, value
