"""The command line of `mqo`: each command calls the library.

Libraries are imported inside the commands: `mqo --help` and the read-only commands start fast.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mqo.data.cli import data
from mqo.display import stderr
from mqo.errors import MqoError
from mqo.launch import evaluation_cli
from mqo.launch.evaluation_cli import IgnoreOption, TokenizerOption
from mqo.output import folder_of, target_of
from mqo.overlay import cli as overlay_cli
from mqo.overlay.cli import TreeOption, root_of, settled
from mqo.perf.cli import perf
from mqo.project import Project
from mqo.recipes.cli import WithOption, WithoutOption, recipe
from mqo.report.cli import report
from mqo.simulate.cli import ANY_WORDS, PassesOn, simulate
from mqo.sweep.cli import sweep
from mqo.terminal import GemmsOption, JsonOption, emit, guarded
from mqo.track import cli as track_cli

if TYPE_CHECKING:
    from mqo.runs import RunFolder

app = typer.Typer(
    help="Megatron Quant Overlay: patch a vendored Megatron-LM, run it quantized, undo it exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
matrix = typer.Typer(help="Write the training scripts, and list the names.", no_args_is_help=True)
app.add_typer(matrix, name="matrix")
convert = typer.Typer(
    help="Convert weights from and to Hugging Face's format.", no_args_is_help=True
)
app.add_typer(convert, name="convert")
app.add_typer(data, name="data")
app.add_typer(recipe, name="recipe")
overlay_cli.register(app)
evaluation_cli.register(app)
app.command()(sweep)
app.command()(report)
app.command()(perf)
app.command(cls=PassesOn, context_settings=ANY_WORDS)(simulate)


def _draw(run: RunFolder, folder: Path) -> list[Path]:
    """Draw what a tracker shows of a run; nothing of what it did not measure."""
    try:
        from mqo.report import pictures
    except ImportError:  # the extra `report` is not there
        return []
    drawn = []
    for name, draw in (("loss", pictures.plot), ("operands", pictures.plot_operands)):
        with suppress(MqoError, ImportError, ValueError, KeyError):  # nor of a damaged run
            draw([run], folder / f"{name}.png")
            drawn.append(folder / f"{name}.png")
    return drawn


track_cli.register(app, _draw)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(Project.here().version())
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Patch a vendored Megatron-LM, run it quantized, undo it exactly."""


def main() -> None:
    """Run the `mqo` program."""
    logging.basicConfig(format="mqo: %(message)s", stream=sys.stderr)
    guarded(app)


@app.command()
def setup() -> None:
    """Prepare what is missing: the vendored tree, the patches, the sample data."""
    from mqo.data.prepare import prepare
    from mqo.launch.prepare import ready_tree
    from mqo.matrix import tables
    from mqo.overlay.series import Series

    project = Project.here()
    ready_tree(project, Series.of(project), print, allow_edits=False)
    for name in tables.datasets():
        ready = prepare(project, name, report=print)
        print(f"data     : {ready.documents} documents, {ready.tokens:,} tokens of {ready.dataset}")


@app.command()
def doctor(as_json: JsonOption = False, tree: TreeOption = None) -> None:
    """Report what is installed, and what each missing piece costs; exit 1 if action is due."""
    from mqo.doctor import examine, lines
    from mqo.overlay.tree import Tree

    project = Project.here()
    found = examine(project, Tree(root_of(tree)))
    emit("doctor", found, "\n".join(lines(found)), as_json, clean=found.clean)
    raise typer.Exit(0 if found.clean else 1)


@app.command()
def stats(
    file: Annotated[Path, typer.Argument(help="A safetensors file, such as a run's dumps/ hold.")],
    tensor: Annotated[
        list[str] | None, typer.Option(help="A tensor to measure, by name or pattern; repeatable.")
    ] = None,
    axis: Annotated[
        int | None,
        typer.Option(help="Axis of MX blocks; default: a dumped operand's own, else the last."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how well each format, block and scale rule represents a saved tensor."""
    from mqo.report.stats import lines, measure

    found = measure(Project.here().ours, file, tensor or (), axis)
    emit("stats", found, "\n".join(lines(found)), as_json)


@app.command()
def plot(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders; default: the newest.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", help="A .png, .svg or .pdf; default: loss.png, or operands.png."
        ),
    ] = None,
    operands: Annotated[
        bool,
        typer.Option("--operands", help="Draw SQNR, underflow, saturation by operand and depth."),
    ] = False,
) -> None:
    """Draw the loss curves of runs, or what the quantizers of one mode measured."""
    from mqo.report import pictures
    from mqo.runs import RunFolder, latest

    target = out or Path("operands.png" if operands else "loss.png")
    target_of(target)  # before the runs are read
    chosen = [RunFolder(path) for path in runs or []] or [latest(Project.here().runs)]
    draw = pictures.plot_operands if operands else pictures.plot
    draw(chosen, target)
    print(target)


@app.command()
def rerun(
    run: Annotated[Path | None, typer.Argument(help="A run folder; by default the newest.")] = None,
    allow_versions: Annotated[
        bool, typer.Option("--allow-versions", help="Allow other versions of packages.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run the code of a run that was not made here.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Replay a run from its kept source and compare the losses; exit 1 if a bit differs."""
    from mqo.display import Display
    from mqo.launch.rerun import BitEqual
    from mqo.launch.rerun import rerun as replay
    from mqo.runs import RunFolder, latest

    say = Display.on(sys.stderr if as_json else sys.stdout)
    project = Project.here()
    original = RunFolder(run.resolve()) if run else latest(project.runs)
    found = replay(project, original, allow_versions=allow_versions, trust=trust, report=say)
    emit("rerun", found, found.line(), as_json)
    raise typer.Exit(0 if isinstance(found, BitEqual) else 1)


@app.command()
def coverage(
    model: Annotated[str, typer.Option(help="A model.")],
    mode: Annotated[
        str | None, typer.Option(help="A mode; or 'source', the types in the tree.")
    ] = None,
    gemms: GemmsOption = "fprop",
    recipe: Annotated[str | None, typer.Option(help="A recipe of the linear layers.")] = None,
    without: WithoutOption = None,
    with_: WithOption = None,
    training_config: Annotated[str, typer.Option(help="Sets the sizes.")] = "standard",
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Show every matrix product of a training step, its type, and the share that is quantized."""
    from mqo.launch import coverage as program
    from mqo.launch.config import resolve
    from mqo.matrix import tables
    from mqo.overlay.series import Series
    from mqo.recipes.recipe import chosen

    project = Project.here()
    choice = tables.check_gemms(gemms)
    how = chosen(recipe, without or (), with_ or ())
    if mode is None and how is None:
        raise MqoError("Neither a mode nor a recipe was named", expected="--mode or --recipe")
    mode = mode or tables.UNQUANTIZED  # of attention, which no recipe is for
    # The sizes do not depend on the dataset.
    dataset = next(iter(tables.datasets()))
    config = resolve(model, dataset, mode, training_config, gemms=choice, recipe=how)
    found = program.of_config(project, settled(tree), Series.of(project), config)
    differing = program.differing_layers(config, found)
    facts = program.names(config) | found.as_table() | {"differing": differing}
    emit("coverage", None, program.as_text(config, found).rstrip(), as_json, **facts)


@convert.command()
def hf_to_megatron(
    source: Annotated[Path, typer.Argument(help="A folder with config.json and safetensors.")],
    target: Annotated[Path, typer.Argument(help="A new folder for the checkpoint.")],
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Make a checkpoint that a training starts from."""
    from mqo.launch.convert import hf_to_megatron as convert

    made = convert(root_of(tree), source.resolve(), target_of(target), stderr())
    emit("convert", made, "\n".join(made.lines()), as_json)


@convert.command()
def megatron_to_hf(
    source: Annotated[Path, typer.Argument(help="A run or checkpoints; the newest are taken.")],
    target: Annotated[Path, typer.Argument(help="A new folder, for transformers to load.")],
    tokenizer: TokenizerOption = None,
    vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Rows to keep; by default the tokenizer's tokens.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16; by default the checkpoint's.")
    ] = None,
    ignore_argument: IgnoreOption = None,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Make a folder that transformers loads, with its tokenizer and a model card."""
    from mqo.launch.convert import megatron_to_hf as convert
    from mqo.matrix import tables

    kind = tables.check_dtype(dtype)
    paths = source.resolve(), target_of(target), tokenizer and tokenizer.resolve()
    made = convert(root_of(tree), *paths, vocab_size, kind, stderr(), ignore_argument or ())
    emit("convert", made, "\n".join(made.lines()), as_json)


@app.command()
def export(
    source: Annotated[Path, typer.Argument(help="A run, checkpoints, or transformers' folder.")],
    target: Annotated[Path, typer.Argument(help="A new folder, for other programs to load.")],
    quant_type: Annotated[
        str | None, typer.Option("--format", help="A type for all; default: as the run had them.")
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="compressed-tensors, fp8 or mqo; default: the first that fits."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Round to fp32, bf16 or fp16 first.")] = None,
    ignore_argument: IgnoreOption = None,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Write trained weights as codes and scales, and say which programs load them."""
    from mqo.launch.export import export as write
    from mqo.matrix import tables

    kind = tables.check_dtype(dtype)
    places = source.resolve(), target_of(target)
    made = write(root_of(tree), *places, quant_type, layout, kind, stderr(), ignore_argument or ())
    emit("export", made, "\n".join(made.lines()), as_json)


@matrix.command()
def generate(
    types: Annotated[
        str | None, typer.Option(help="Quant types whose scripts to write, as nvfp4,hif4; or all.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="With --types: the folder for them.")
    ] = None,
) -> None:
    """Write the pretrain scripts, and the tables of modes and formats in the documentation.

    With --types and --out: write the scripts of other types, and nothing else.
    """
    project = Project.here()
    own = project.root / "script"
    if project.is_installed:
        raise MqoError("Scripts start the launcher of a clone", expected="a clone of mqo")
    from mqo.matrix.generate import write
    from mqo.matrix.tables import expand, quant_types

    if (types is None) != (out is None) or (out and out.resolve() == own):
        raise MqoError(
            f"{own} holds the documented scripts alone",
            expected="--types with --out and another folder, or neither",
        )
    named = types and expand("quant type", dict.fromkeys(quant_types()), types)
    changed = write(folder_of(out) if out else own, named)
    print("\n".join(map(str, changed)) or "nothing to do: all is as generated")


@matrix.command(name="list")
def list_names() -> None:
    """List models, datasets, modes and training configurations."""
    from mqo.launch.cli import listing

    print(listing())
