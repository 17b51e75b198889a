"""script/train_config.py and script/flash_attention_config.py: the documented command lines.

argparse rather than typer: five optional positional arguments, options between them, and Megatron's
own flags behind `--`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from mqo.display import Display
from mqo.errors import MissingError, MqoError
from mqo.launch.checks import check_run
from mqo.launch.command import as_shell
from mqo.launch.config import SOURCE, Cluster, RunConfig, resolve
from mqo.launch.coverage import differing_of
from mqo.launch.finished import finished
from mqo.launch.flags import NO_FUSIONS
from mqo.launch.machine import Machine, detect, imagined
from mqo.launch.naming import own_data
from mqo.launch.options import OPTIONS, add_arguments, given, split
from mqo.launch.plan import Planned, place
from mqo.launch.prepare import check_config, check_tree
from mqo.launch.run import check_checkpoint, dry_run, run, with_checkpoint_library
from mqo.launch.source import ready_checkout, source_diff, types_of
from mqo.matrix import tables
from mqo.output import folder_of
from mqo.overlay.series import Series
from mqo.overlay.tree import Tree
from mqo.project import Project
from mqo.recipes import recipe as recipes
from mqo.recipes.recipe import INGREDIENTS, OUTPUT_LAYER, Recipe
from mqo.runs import RunFolder
from mqo.scale.devices import DEVICES
from mqo.terminal import guarded
from mqo.track.session import check as check_tracker

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


def main(front_end: bool = False) -> None:
    """Train a model, or list the names there are.

    `front_end` is the command line for attention alone.
    """
    guarded(lambda: _main(sys.argv[1:], front_end))


def _main(argv: list[str], front_end: bool) -> None:
    own, extra = split_flags(argv)
    args = parser(front_end).parse_intermixed_args(own)
    if args.version:
        print(Project.here().version())
        return
    if args.list:
        print(listing(front_end))
        return
    if args.tracker is not None:
        check_tracker(args.tracker)
    machine = _machine(args)
    config = config_from(args, extra, machine)
    for folder in filter(None, (args.checkpoint, args.tensorboard)):
        folder_of(folder)
    project = Project.here(args.runs and folder_of(args.runs))
    if args.dry_run:
        _dry_run(project, config, machine, args)
        return
    say = Display.on(sys.stdout)
    if (done := finished(config)) is not None:
        say(f"finished : {done.line()}")
        return
    result = run(
        project,
        config,
        allow_edits=args.allow_edits,
        report=say,
        tracker=args.tracker,
        take_lock=args.take_lock,
    )
    say(f"result   : {result.line()}")
    for line in differing_of(RunFolder(Path(result.run))):
        say(f"         : {line}")
    say(f"folder   : {result.run}")


def _dry_run(
    project: Project, config: RunConfig, machine: Machine, args: argparse.Namespace
) -> None:
    """Print what the command would do, and what is missing; raise what it would refuse.

    For a machine that is planned for, the tree on this one is not the run's: its edits are a note.
    """
    missing: list[MissingError] = []
    check_config(config, machine, missing)
    notes = [f"missing: {error}" for error in missing]
    try:
        check_tree(project, config, allow_edits=args.allow_edits)
    except MqoError as error:
        if args.device is None:
            raise
        notes.append(f"not yet: {error}")
    try:
        check_checkpoint(project, config)
    except MqoError as error:  # another run saves there now
        notes.append(f"not yet: {error}")
    planned = _planned(project, config, machine)
    notes += _checked(project, planned.config, machine)
    text = describe(project, config, machine, planned)
    print("\n".join([*(f"# {note}" for note in notes), text]))


def _planned(project: Project, config: RunConfig, machine: Machine) -> Planned:
    """Return the run with its layout, and with what a checkpoint's library quantizes."""
    if Tree(project.tree).manifest():
        config = with_checkpoint_library(project, config)
    types = config.quantization.types or _types_there(project, config.placement.megatron)
    return place(project.tree, config, machine, types)


def _checked(project: Project, config: RunConfig, machine: Machine) -> list[str]:
    """Return notes of the checks that need Megatron's source; raise what it refuses."""
    tree = Tree(project.tree)
    if config.placement.megatron is not None:
        return ["not checked here: the flags, which the checkout's own program reads"]
    if tree.manifest() is None:
        return ["not checked yet: flags and patterns of layers, since there is no patched Megatron"]
    types = config.quantization.types or types_of(tree)
    return check_run(project, tree, Series.of(project), config, machine, types)


def split_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return what is ours, and what stands behind the first `--`, which is Megatron's."""
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
    repeatable = {"action": "append", "default": []}
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
    add, number = group.add_argument, {"type": int, "metavar": "N"}
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


def _machine(args: argparse.Namespace) -> Machine:
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
    """Return all names, by kind; T in that of a mode stands for a type."""
    modes = tables.patterns(_modes(front_end))
    rows = {
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


def describe(
    project: Project,
    config: RunConfig,
    machine: Machine | None = None,
    planned: Planned | None = None,
) -> str:
    """Return what a run would do, as shell: its command, and in comments what it would write.

    That is the types in its source, how that source would differ from the tree's, its options, and
    on GPUs the layout with the memory that it needs. `machine` is by default this one, and
    `planned` the run as `place` returns it. Reads the tree if it is there, and changes nothing.
    """
    machine, asked = machine or detect(), config.quantization.types
    lines = [f"source: {site} = {value}" for site, value in (asked or {}).items()]
    planned = planned or _planned(project, config, machine)
    config = planned.config
    lines += [f"library: {library.label}" for library in config.quantization.libraries]
    tree, diff = _source_of(project, config)
    # With `source` the tree gives the sites their types, which are known when it is read.
    sites = asked or dict.fromkeys(tables.SITES, SOURCE)
    options = config.quant_toml(sites).splitlines()[2 + len(sites) :]
    lines += [*diff, *(f"quant.toml: {line}" for line in options)]
    lines += [f"layout: {line}" for line in planned.lines]
    command, variables = dry_run(project, config, machine, tree)
    return "\n".join([*(f"# {line}".rstrip() for line in lines), as_shell(command, variables)])


def _types_there(project: Project, megatron: Path | None) -> Mapping[str, str]:
    """Return the types that stand in the tree; none where it is not there yet."""
    tree = Tree((megatron or project.tree).resolve())
    return types_of(tree) if megatron or tree.manifest() else {}


def _source_of(project: Project, config: RunConfig) -> tuple[Path | None, list[str]]:
    """Return a tree that would be run as it is, and how the source would differ from the tree's."""
    if config.placement.megatron:
        tree = ready_checkout(config, config.placement.megatron, allow_edits=True)
        if tree.manifest() is None:
            return tree.root, [f"source: {tree.root} as it is"]
    else:
        tree = Tree(project.tree)
        if tree.manifest() is None:
            there = tree.root / "megatron/core"
            what = "is not patched" if there.exists() else "holds no Megatron"
            return None, [f"source: {tree.root} {what} yet: a run first sees to that"]
    diff = source_diff(tree, config.quantization.types).splitlines()
    return None, diff or [f"source: as {tree.root} has it, to the byte"]
