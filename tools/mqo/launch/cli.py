"""script/train_config.py: the documented command line.

argparse rather than typer: five optional positional arguments, options between them, and Megatron's
own flags behind `--`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mqo.cli import guarded
from mqo.errors import MqoError
from mqo.launch.cell import SOURCE, Cell, Cluster, resolve
from mqo.launch.folder import as_shell, quant_config
from mqo.launch.quantiser import Quantiser, choices
from mqo.launch.run import dry_run, run
from mqo.matrix import tables
from mqo.project import Project


def main() -> None:
    """Train a cell of the matrix, or list what there is."""
    guarded(lambda: _main(sys.argv[1:]))


def _main(argv: list[str]) -> None:
    own, extra = split_flags(argv)
    args = parser().parse_intermixed_args(own)
    if args.list:
        print(listing())
        return
    cell = cell_from(args, extra)
    project = Project.here()
    if args.dry_run:
        print(describe(project, cell))
        return
    result = run(project, cell, allow_edits=args.allow_edits, report=_say)
    _say(f"result   : {result.line()}")
    _say(f"folder   : {result.run}")


def split_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """What is ours, and what stands behind the first `--`, which is Megatron's."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def parser() -> argparse.ArgumentParser:
    """The options; names are checked against the tables, not here, so that errors list them."""
    made = argparse.ArgumentParser(
        description="Train a cell of the matrix in a run folder of its own.",
        epilog="Everything behind `--` goes to Megatron's own argument parser.",
    )
    for name, meaning in (
        ("checkpoint", "where to save, and to resume from if it holds a checkpoint"),
        ("tensorboard", "where TensorBoard's events go"),
        ("tokenizer", "a tokenizer folder, as transformers saves one"),
        ("data_prefix", "an indexed dataset: the path without .bin and .idx"),
        ("dtype", "fp32, bf16 or fp16"),
    ):
        kind = str if name == "dtype" else Path
        made.add_argument(name, nargs="?", type=kind, metavar=name.upper(), help=meaning)
    made.add_argument("--list", action="store_true", help="list all valid names")
    made.add_argument("--model")
    made.add_argument("--dataset")
    made.add_argument("--quantization", help=f"a mode; or '{SOURCE}', the types in the tree")
    made.add_argument("--training-config", default="standard")
    made.add_argument("--gemms", default="fprop", help="fprop; or all: dgrad and wgrad, too")
    made.add_argument("--without", action="append", default=[], help="a patch to leave out")
    made.add_argument(
        "--keep-last", type=_whole, default=0, metavar="N", help="checkpoints to keep; 0: all"
    )
    made.add_argument(
        "--check-nan", action="store_true", help="find the layer of the first NaN or infinity; slow"
    )
    made.add_argument("--allow-edits", action="store_true", help="run a tree edited by hand")
    made.add_argument("--dry-run", action="store_true", help="show the command, do nothing")
    _add_quantiser(made.add_argument_group("the quantisers (docs/quantisation.md)"))
    cluster = made.add_argument_group("processes (torchrun's terms)")
    cluster.add_argument("--nnodes", type=int, default=1)
    cluster.add_argument("--node-rank", type=int, default=0)
    cluster.add_argument("--master-addr", default="localhost")
    cluster.add_argument("--master-port", type=int)
    cluster.add_argument("--nproc-per-node", type=int, default=1)
    return made


def _add_quantiser(group: argparse._ArgumentGroup) -> None:
    for option, meaning in (
        ("block", "elements that share an mx scale"),
        ("scale_rule", "how an mx scale follows from its block"),
        ("rounding", "of elements; each format has its own"),
        ("overflow", "what hifp8 makes of what is too large"),
        ("save_activations", "what linear layers keep for backward: packed is their codes"),
    ):
        valid = choices(option)
        kind, name = type(valid[0]), "--" + option.replace("_", "-")
        group.add_argument(name, type=kind, choices=valid, help=meaning)
    yes = {"action": "store_const", "const": True}
    group.add_argument("--tensor-scale", help="give hifp8 a scale for each tensor", **yes)
    group.add_argument("--quant-seed", type=_whole, metavar="N", help="of stochastic rounding")
    group.add_argument("--cache-weights", help="quantise a weight once an optimizer step", **yes)
    group.add_argument(
        "--schedule",
        action="append",
        default=[],
        metavar="SITE:TYPES",
        help="types that change: 'linear: mxfp4 until 0.9, then bf16', 'qk: mxfp8 until 500, ...'",
    )
    group.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="[SITE:]GLOB",
        help="layers to leave unquantised, by name: output_layer, 'decoder.layers.0.*', 'qk:*.1.*'",
    )
    group.add_argument(
        "--record-every", type=_whole, metavar="N", help="measure the quantisers so often; 0: never"
    )
    group.add_argument(
        "--dump",
        action="append",
        type=_whole,
        default=[],
        metavar="ITERATION",
        help="an iteration whose operands are saved, for `mqo stats`",
    )


def _whole(text: str) -> int:
    """A whole number from 0 on, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number")
    return int(text)


def cell_from(args: argparse.Namespace, extra: list[str]) -> Cell:
    """The cell that the arguments name; a missing or unknown name lists the valid ones."""
    for option in ("model", "dataset", "quantization"):
        if getattr(args, option) is None:
            raise MqoError(f"--{option} is missing", help="--list shows all valid names")
    tables.check_choice("dtype", args.dtype, (None, *tables.DTYPES))
    tables.check_choice("choice of GEMMs", args.gemms, tuple(tables.LINEAR_SITES))
    for pattern in args.exclude:
        site, colon, _ = pattern.rpartition(":")
        tables.check_choice("GEMM site", site, (*tables.SITES, *(() if colon else ("",))))
    fields = ("nnodes", "node_rank", "master_addr", "master_port", "nproc_per_node")
    return resolve(
        args.model,
        args.dataset,
        args.quantization,
        args.training_config,
        gemms=args.gemms,
        dtype=args.dtype,
        cluster=Cluster(**{name: getattr(args, name) for name in fields}),
        checkpoint=args.checkpoint,
        tensorboard=args.tensorboard,
        tokenizer=args.tokenizer,
        data_prefix=args.data_prefix,
        extra_flags=tuple(extra),
        without=tuple(args.without),
        quantiser=quantiser_from(args),
        schedule=tuple(args.schedule),
        exclude=tuple(args.exclude),
        record_every=args.record_every,
        dump=tuple(args.dump),
        keep_checkpoints=args.keep_last,
        check_nan=args.check_nan,
    )


def quantiser_from(args: argparse.Namespace) -> Quantiser:
    """The quantisers' options that the arguments give."""
    given = {name: getattr(args, name) for name in Quantiser.model_fields if name != "seed"}
    return Quantiser(seed=args.quant_seed, **given)


def listing() -> str:
    """All names, by kind."""
    rows = {
        "models": tables.models(),
        "datasets": tables.datasets(),
        "quantizations": [*tables.modes(), SOURCE],
        "training configs": tables.trainings(),
    }
    return "\n".join(
        f"{kind}:\n" + "".join(f"  {n}\n" for n in names) for kind, names in rows.items()
    )


def describe(project: Project, cell: Cell) -> str:
    """The command that a run of the cell would start, and the types and options it would write."""
    types = cell.types or {}
    lines = [f"# source: {site} = {value}" for site, value in types.items()]
    # Sites that the tree gives their types: which, is known when it is read.
    sites = types or dict.fromkeys(tables.SITES, SOURCE)
    options = quant_config(sites, cell).splitlines()[2 + len(sites) :]
    lines += [f"# quant.toml: {line}" for line in options]
    return "\n".join([*lines, as_shell(dry_run(project, cell), {})])


def _say(text: str) -> None:
    print(text, flush=True)
