"""The documented command line of a training: its options, and the run that they configure.

It uses argparse instead of typer: there are five optional positional arguments, options between
them, and Megatron's own flags after `--`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from mqo.errors import MqoError
from mqo.launch.config import SOURCE, Cluster, RunConfig, resolve
from mqo.launch.flags import NO_FUSIONS
from mqo.launch.machine import Machine, detect, imagined
from mqo.launch.naming import own_data
from mqo.launch.options import OPTIONS, add_arguments, given, split
from mqo.matrix import tables
from mqo.recipes import recipe as recipes
from mqo.recipes.recipe import INGREDIENTS, OUTPUT_LAYER, Recipe
from mqo.scale.devices import DEVICES

GPUS_PER_NODE = 8  # of a machine that is planned for
MODE, FA_MODE = "--quantization", "--fa-quantization"
_DEFAULT = "(default: %(default)s)"
_POSITIONAL = {
    "checkpoint": "where to save, and to resume from if it holds a checkpoint; default: the run's "
    "folder (tiny, study: none)",
    "tensorboard": "where TensorBoard's events go; default: the run's folder",
    "tokenizer": "a folder with tokenizer.json, as transformers saves one; default: the sample's",
    "data_prefix": "an indexed dataset: the path without .bin and .idx; default: the sample "
    "(smoke, study, tiny alone)",
    "dtype": "fp32, bf16 or fp16; default: the training configuration's",
}


def split_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return our arguments, and Megatron's, which follow the first `--`."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise MqoError(
            f"The command line is not understood: {message}",
            help="--help explains it; Megatron's own flags go after `--`",
        )


def parser(front_end: bool = False) -> argparse.ArgumentParser:
    """Return the parser, which takes any name: the tables check them, and errors list them."""
    made = _Parser(
        description="Train a model on a dataset in a mode; each run has a folder of its own.",
        epilog=f"MODE is one of {', '.join(tables.patterns(_modes(front_end)))}. "
        f"{tables.TYPES_T}. Everything after `--` goes to Megatron's own argument parser.",
        allow_abbrev=False,
    )
    for name, meaning in _POSITIONAL.items():
        kind = str if name == "dtype" else Path
        made.add_argument(name, nargs="?", type=kind, metavar=name.upper(), help=meaning)
    add = made.add_argument
    add("--version", action="store_true", help="show the version")
    add("--list", action="store_true", help="list all valid names")
    add("--model", metavar="NAME", help="a model; --list shows all names")
    own = "for data of your own any name (default: that of the data file)"
    add("--dataset", metavar="NAME", help=f"a dataset; {own}")
    changed = "what to call the model if your flags change it (default: NAME*)"
    add("--name", metavar="NAME", help=changed)
    add("--training-config", default="standard", metavar="NAME", help=f"sizes, schedule {_DEFAULT}")
    _add_types(made, front_end)
    add("--teacher", type=Path, metavar="RUN", help="a run, or its checkpoints, to distill from")
    add("--distillation-config", type=Path, metavar="FILE", help="YAML (docs/distillation.md)")
    add("--runs", type=Path, metavar="DIR", help="where run folders go; default: runs/")
    add("--tracker", metavar="NAME", help="send the run to wandb or mlflow while it trains")
    add("--megatron", type=Path, metavar="PATH", help="a patched full Megatron-LM checkout to run")
    repeatable: dict[str, Any] = {"action": "append", "default": []}
    what = "a patch to leave out, or what the recipe has of: " + ", ".join(INGREDIENTS)
    add("--without", metavar="NAME", help=f"{what}; repeatable", **repeatable)
    add("--no-fusions", action="store_true", help="leave out fused kernels, for comparisons")
    taken = "take CHECKPOINT also from a run that seems to save there (docs/checkpoints.md)"
    add("--take-lock", action="store_true", help=taken)
    add("--allow-edits", action="store_true", help="run a tree that was edited by hand")
    add("--dry-run", action="store_true", help="show the command and the memory; do nothing")
    names = ", ".join(DEVICES)
    add("--device", metavar="NAME", help=f"with --dry-run: plan for these GPUs: {names}")
    quantizer, recorder = split(OPTIONS)
    group = made.add_argument_group("the quantizers (docs/formats.md)")
    add_arguments(group, quantizer.values())
    changing = "types that change, repeatable: 'linear: mxfp4 until 0.9, then bf16', "
    changing += "'qk: mxfp8 until 500, ...'"
    group.add_argument("--schedule", metavar="SITE:TYPES", help=changing, **repeatable)
    add_arguments(made.add_argument_group("what the run keeps"), recorder.values())
    _add_cluster(made.add_argument_group("processes (torchrun's terms)"))
    return made


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    add = group.add_argument
    add("--nnodes", default=1, help=f"nodes, each with a launcher {_DEFAULT}", **number)
    add("--node-rank", default=0, help=f"the index of this node, from 0 {_DEFAULT}", **number)
    what = "processes per node, one per GPU (default: all GPUs for standard and fast, else 1)"
    add("--nproc-per-node", help=what, **number)
    where = f"address of node 0, for several nodes {_DEFAULT}"
    add("--master-addr", default="localhost", metavar="HOST", help=where)
    what = "port of node 0; default: torchrun's"
    add("--master-port", type=int, metavar="PORT", help=what)


def _add_types(made: argparse.ArgumentParser, front_end: bool) -> None:
    if front_end:
        made.add_argument(
            FA_MODE, dest="quantization", metavar="MODE", help="a mode of attention alone"
        )
        made.set_defaults(
            front_end=True, gemms="fprop", linear_quantization=None, attention_quantization=None
        )
        made.set_defaults(recipe=None, with_=[], allow_mostly_unquantized=False)
        return
    made.set_defaults(front_end=False)
    which = f"GEMMs of linear layers to quantize: fprop, or all: also dgrad and wgrad {_DEFAULT}"
    linear = "type of linear layers, in place of the mode's: T or none"
    attention = (
        "types of attention, in place of the mode's: T as in FA_T (QK), qk_T, pv_T, qk_pv_T or none"
    )
    add = made.add_argument
    add(MODE, metavar="MODE", help=f"a mode; or '{SOURCE}', the types in the tree")
    add("--gemms", default="fprop", metavar="WHICH", help=which)
    add("--linear-quantization", metavar="T", help=linear)
    add("--attention-quantization", metavar="T", help=attention)
    recipe = "how linear layers are quantized, operand by operand: a name of `mqo recipe list`"
    add("--recipe", metavar="NAME", help=f"{recipe}, or FILE.toml")
    few = "run a recipe that leaves most of the linear layers' FLOPs unquantized"
    add("--allow-mostly-unquantized", action="store_true", help=few)
    head = f"what a recipe quantizes beside: {OUTPUT_LAYER}"
    add("--with", dest="with_", metavar="NAME", help=head, action="append", default=[])


def machine_of(args: argparse.Namespace) -> Machine:
    """Return this machine, or with --device the one to plan for."""
    if args.device is None:
        return detect()
    if not args.dry_run:
        raise MqoError(
            "--device is for plans of machines that are not there",
            expected="--dry-run beside it",
            help="A run takes the devices that it finds",
        )
    return imagined(args.device, args.nproc_per_node or GPUS_PER_NODE)


def config_from(
    args: argparse.Namespace, extra: list[str], machine: Machine | None = None
) -> RunConfig:
    """Return what the arguments name; a missing or unknown name lists the valid ones.

    Its processes are, unless given, as many as the machine has GPUs; by default that is this one.
    """
    mode = args.quantization
    given_types = (args.linear_quantization, args.attention_quantization, args.recipe)
    if mode is None and any(given_types):
        mode = tables.UNQUANTIZED  # which these change
    for option, value in (
        ("--model", args.model),
        ("--dataset", args.dataset or own_data(args.data_prefix, extra)),
        (FA_MODE if args.front_end else MODE, mode),
    ):
        if value is None:
            raise MqoError(f"{option} is missing", help="--list shows all valid names")
    if args.front_end:
        tables.check_choice("quantization of attention", mode, _modes(front_end=True))
    tables.check_dtype(args.dtype)
    tables.check_gemms(args.gemms)
    where = {name: getattr(args, name) for name in Cluster.model_fields}
    training = tables.pick(tables.trainings(), "training configuration", args.training_config)
    gpus = 0 if training.is_smoke else (machine or detect()).gpus
    where["nproc_per_node"] = args.nproc_per_node or max(1, gpus)
    recipe, without = _recipe(args)
    plain = ("dtype", "gemms", *_POSITIONAL, "name", "teacher", "distillation_config", "megatron")
    return resolve(
        args.model,
        args.dataset,
        mode,
        args.training_config,
        linear=args.linear_quantization,
        attention=args.attention_quantization,
        recipe=recipe,
        allow_mostly_unquantized=args.allow_mostly_unquantized,
        cluster=Cluster(**where),
        without=without,
        schedule=tuple(args.schedule),
        extra_flags=(*(NO_FUSIONS if args.no_fusions else ()), *extra),
        **{name: getattr(args, name) for name in dict.fromkeys(plain)},
        **given(args),
    )


def _recipe(args: argparse.Namespace) -> tuple[Recipe | None, tuple[str, ...]]:
    """Return the recipe as it was changed, and the patches to leave out."""
    ingredients = [name for name in args.without if name in INGREDIENTS]
    patches = tuple(name for name in args.without if name not in INGREDIENTS)
    recipe = recipes.chosen(args.recipe, ingredients, args.with_)
    if args.allow_mostly_unquantized and recipe is None:
        raise MqoError(
            "--allow-mostly-unquantized is for recipes, and none was given", expected="--recipe"
        )
    return recipe, patches


def listing(front_end: bool = False) -> str:
    """Return all names by kind; T in the name of a mode is a quant type."""
    modes = tables.patterns(_modes(front_end))
    rows: dict[str, Iterable[str]] = {
        "models": tables.models(),
        "datasets": tables.datasets(),
        **({"fa-quantizations": modes} if front_end else {"quantizations": [*modes, SOURCE]}),
        "types T": tables.quant_types(),
        **({} if front_end else {"recipes": recipes.names()}),
        "training configs": tables.trainings(),
    }
    return "\n".join(
        f"{kind}:\n" + "".join(f"  {n}\n" for n in names) for kind, names in rows.items()
    )


def _modes(front_end: bool) -> list[str]:
    return [name for name, mode in tables.modes().items() if mode.front_end or not front_end]
