"""`mqo sensitivity`: which blocks, layers or GEMMs of a saved model quantization changes most."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mqo.commands.options import (
    CHECKPOINTS,
    FormatsOption,
    IgnoreOption,
    JsonOption,
    PluginOption,
    PluginOptionOption,
    TokenizerOption,
    TreeOption,
    WithOption,
    WithoutOption,
    settled,
)
from mqo.display import stderr
from mqo.terminal import emit


def sensitivity(
    checkpoint: Annotated[Path, typer.Argument(help=CHECKPOINTS)],
    mode: Annotated[
        str | None, typer.Option(help="A mode, with all three GEMMs of linear layers.")
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="A recipe, or FILE.toml, instead.")] = None,
    without: WithoutOption = None,
    with_: WithOption = None,
    by: Annotated[
        str,
        typer.Option(help="What is quantized at a time: block, part, layer, gemm or operand."),
    ] = "block",
    rank: Annotated[
        str, typer.Option(help="Rank by the change of the gradient, or of the loss.")
    ] = "gradient",
    rules: Annotated[
        str | None,
        typer.Option(
            metavar="N%",
            help="Also write a recipe that keeps the most sensitive ones unquantized: at most N% "
            "of the weights.",
        ),
    ] = None,
    data: Annotated[list[Path] | None, typer.Option(help="An indexed dataset; repeatable.")] = None,
    text: Annotated[Path | None, typer.Option(help="A file of plain text.")] = None,
    tokenizer: TokenizerOption = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to predict.")] = 4096,
    out: Annotated[
        Path,
        typer.Option(
            "-o", "--out", help="The picture, a .png, .svg or .pdf; the recipe is .toml next to it."
        ),
    ] = Path("sensitivity.png"),
    formats: FormatsOption = None,
    plugin: PluginOption = None,
    plugin_option: PluginOptionOption = None,
    ignore_argument: IgnoreOption = None,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Quantize one part of a saved model at a time, and rank the changes of loss and gradient."""
    from mqo.launch import evaluation
    from mqo.launch.forward_pass import SavedModel
    from mqo.launch.own_types import OwnTypes
    from mqo.matrix.tables import check_choice
    from mqo.output import target_of
    from mqo.quant.subsets import KINDS
    from mqo.report.pictures import check_ending, pyplot
    from mqo.sensitivity import rules as keep
    from mqo.sensitivity.choice import chosen_recipe, passes
    from mqo.sensitivity.measure import RANKS, measure, table_lines
    from mqo.sensitivity.picture import draw

    check_choice("kind of parts", by, KINDS)
    check_choice("ranking", rank, RANKS)
    check_ending(out)
    pyplot()  # before the program starts: it may not be installed
    files = [target_of(out)]
    share = None
    if rules is not None:
        share = keep.share_of(rules)
        keep.check_kind(by)
        files.append(target_of(out.with_suffix(".toml")))
    own = OwnTypes.from_options(formats, plugin, plugin_option)  # before names are checked
    measured = chosen_recipe(mode, recipe, without or (), with_ or ())
    quant = passes(measured, own)
    request = evaluation.text(data or (), text, tokenizer, tokens)
    request |= {"ignored": ignore_argument or []}
    model = SavedModel.find(checkpoint)
    label = quant.name if recipe is None else measured.label
    result = measure(settled(tree), model, quant, label, by, rank, request, stderr())
    lines = table_lines(result)
    if share is not None:
        chosen = keep.kept(result, share)
        summary = f"{label}, except the most sensitive {by}s of {result.checkpoint}"
        keep.write(keep.keeping(measured, chosen), quant.plugins, summary, files[1])
        lines.append(f"kept unquantized: {', '.join(change.name for change in chosen)}")
    draw(result, files[0])
    lines += map(str, files)
    emit("sensitivity", result, "\n".join(lines), as_json, files=list(map(str, files)))
