"""`mqo simulate`: simulate a training step on machines that you do not have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from mqo.commands.options import JsonOption, TreeOption, settled
from mqo.terminal import emit

ANY_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True}


class PassesOn(TyperCommand):
    """A command that keeps the arguments after `--`, which are Megatron's, separate."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what comes before the first `--`."""
        at = args.index("--") if "--" in args else len(args)
        ctx.obj = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


def simulate(
    context: typer.Context,
    script: Annotated[
        Path, typer.Argument(help="A script of script/, or `train` with its options.")
    ],
    device: Annotated[str, typer.Option(help="The GPUs: h100-80gb, h200, b200 ...")],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes with 8 GPUs each.")] = 1,
    imbalance: Annotated[
        float, typer.Option(min=1.0, help="Load of a rank's experts over its even share.")
    ] = 1.0,
    page: Annotated[
        Path | None, typer.Option("-o", "--out", help="Also write a page: an .html file.")
    ] = None,
    native: Annotated[
        bool, typer.Option("--native", help="Estimate a GPU that computes in the formats.")
    ] = False,
    as_json: JsonOption = False,
    tree: TreeOption = None,
) -> None:
    """Run a training script's step on tensors without data: does it fit, and what bounds it?

    Other arguments go to the script: its options, and Megatron's flags after `--`.

    With --native the emulated quantizers are replaced by an estimate of GEMMs in the formats.

    Upstream's own program runs, with the script's flags and quant types, as a rank of each distinct
    pipeline stage; exit 1 if it does not fit.
    """
    from mqo.display import stderr
    from mqo.errors import MqoError
    from mqo.output import new_file, target_of
    from mqo.simulate.command import SimulationOptions, estimated, prepared
    from mqo.simulate.lines import native_lines, simulation_lines

    if native and page is not None:
        raise MqoError(
            "--native has no page", expected="--native without --out, as text or with --json"
        )
    if page is not None and not page.absolute().parent.is_dir():
        raise MqoError(
            f"The folder of {page} does not exist", expected="a file in an existing folder"
        )
    if page is not None:
        target_of(page)  # before the step runs
    options = SimulationOptions(
        script, tuple(context.args), tuple(context.obj), device, nodes, imbalance
    )
    if native:
        estimate = estimated(options, settled(tree), stderr())
        text = "\n".join(native_lines(estimate))
        emit("simulate", None, text, as_json, **estimate.as_table())
        raise typer.Exit(0 if estimate.fits else 1)
    result = prepared(options, settled(tree)).simulate(stderr())
    if page is not None:
        from mqo.simulate.page import page as render

        with new_file(page) as file:
            file.write_text(render(result), encoding="utf-8")
        print(page, file=sys.stderr)
    emit("simulate", None, "\n".join(simulation_lines(result)), as_json, **result.as_table())
    raise typer.Exit(0 if result.fits else 1)
