"""Define the command line of a training, and turn its arguments into a run configuration.

It uses argparse instead of typer because it takes five optional positional arguments, options
between them, and Megatron's own flags after `--`.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from mqo.errors import MqoError
from mqo.launch.config import SOURCE, Cluster, RunConfig, resolve
from mqo.launch.flags import NO_FUSIONS
from mqo.launch.hybrid import ModelClass
from mqo.launch.machine import Machine, detect, imagined
from mqo.launch.models import shrink_of
from mqo.launch.naming import own_data
from mqo.launch.options import OPTIONS, add_arguments, given, split
from mqo.launch.own_data import OwnData, either, of_options
from mqo.launch.own_types import OwnTypes
from mqo.launch.start_weights import fill_in
from mqo.launch.variants import GemmChoice
from mqo.matrix import tables
from mqo.project import Project
from mqo.quant.recipe import OUTPUT_LAYER, Recipe
from mqo.quant.recipe_files import names
from mqo.quant.recipe_operands import INGREDIENTS
from mqo.recipes import recipe as recipes
from mqo.scale.devices import DEVICES

GPUS_PER_NODE = 8  # of a machine to plan for
MODE, FA_MODE = "--quantization", "--fa-quantization"
_DEFAULT = "(default: %(default)s)"
_REPEATABLE: dict[str, Any] = {"action": "append", "default": []}
# A third of a linear layer's FLOPs, which the names of modes do not say.
_LISTED_MODES = "quantizations (of linear layers the forward GEMM; --gemms all: all three)"
_POSITIONAL = {
    "checkpoint": "folder to save in, and to resume from if it holds a checkpoint; default: the "
    "run's folder (tiny, study: none)",
    "tensorboard": "folder for TensorBoard's events; default: the run's folder",
    "tokenizer": "folder with tokenizer.json, as saved by transformers; default: the sample's",
    "data_prefix": "indexed dataset: its path without .bin and .idx; default: the sample "
    "(only smoke, study, tiny)",
    "dtype": "fp32, bf16 or fp16; default: the training configuration's",
}


def split_flags(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return our arguments, and Megatron's, which follow the first `--`."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise MqoError(
            f"The command line is not valid: {message}",
            help=f"{self._nearest(message)}--help lists the options; Megatron's own flags go after "
            "`--`",
        )

    def _nearest(self, message: str) -> str:
        """Return a question about the option nearest to the first unknown one; '' without one."""
        options = [option for action in self._actions for option in action.option_strings]
        unknown = message.partition("unrecognized arguments: ")[2].partition(" ")[0]
        near = difflib.get_close_matches(unknown.partition("=")[0], options, n=1, cutoff=0.8)
        return f"Did you mean {near[0]}? " if near else ""


def _path(text: str) -> Path:
    """Return a path. An empty one is refused: a shell's unset variable would be this folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def parser(front_end: bool = False, program: str | None = None) -> argparse.ArgumentParser:
    """Return the parser. It accepts any name; the tables check names and list the valid ones.

    `program` is the name of the command in its help, by default that of the script.
    """
    result = _Parser(
        prog=program,
        description="Train a model on a dataset in a quantization mode; each run gets a folder.",
        epilog=f"MODE is one of {', '.join(tables.patterns(_modes(front_end)))}. "
        f"{tables.types_text()}. Everything after `--` goes to Megatron's own argument parser.",
        allow_abbrev=False,
    )
    for name, meaning in _POSITIONAL.items():
        kind = str if name == "dtype" else _path
        result.add_argument(name, nargs="?", type=kind, metavar=name.upper(), help=meaning)
    result.add_argument("--version", action="store_true", help="show the version")
    result.add_argument("--list", action="store_true", help="list all valid names")
    _add_model(result)
    _add_data(result)
    sizes = f"batch sizes, length and learning rate {_DEFAULT}"
    result.add_argument("--training-config", default="standard", metavar="NAME", help=sizes)
    _add_types(result, front_end)
    _add_run(result)
    quantizer, recorder = split(OPTIONS)
    group = result.add_argument_group("the quantizers (docs/formats.md)")
    add_arguments(group, quantizer.values())
    changing = "types that change during training, repeatable: "
    changing += "'linear: mxfp4 until 0.9, then bf16', 'qk: mxfp8 until 500, ...'"
    group.add_argument("--schedule", metavar="SITE:TYPES", help=changing, **_REPEATABLE)
    add_arguments(result.add_argument_group("what the run records"), recorder.values())
    _add_cluster(result.add_argument_group("processes (torchrun's terms)"))
    return result


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    own_model = "a model of --list, or your own: FILE or FOLDER with a config.json, or FILE.toml"
    add("--model", metavar="MODEL", help=own_model)
    own = "for your own data any name (default: the name of the data file)"
    add("--dataset", metavar="NAME", help=f"a dataset; {own}")
    changed = "name of your own model, or of one that your flags change (default: NAME*)"
    add("--name", metavar="NAME", help=changed)
    built = "upstream's class of the model (default: gpt, or hybrid with a pattern of layers)"
    add("--model-class", choices=get_args(ModelClass), help=built)
    smaller = "divide the model's width and depth (default: as the training configuration does)"
    add("--shrink", metavar="W,D", help=smaller)
    start = "start from the weights in a Hugging Face folder, with its model and its tokenizer"
    add("--from", dest="start", type=_path, metavar="FOLDER", help=start)


def _add_run(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    formats = "TOML file whose formats become types T (docs/formats.md); repeatable"
    add("--formats", type=_path, metavar="FILE", help=formats, **_REPEATABLE)
    plugin = (
        "Python file whose quantizers become types T, or a name in `mqo plugin list`; repeatable"
    )
    add("--plugin", type=_path, metavar="FILE", help=plugin, **_REPEATABLE)
    option = "option of such a quantizer; repeatable"
    add("--plugin-option", metavar="T.NAME=VALUE", help=option, **_REPEATABLE)
    add("--teacher", type=_path, metavar="RUN", help="run or checkpoints to distill from")
    add("--distillation-config", type=_path, metavar="FILE", help="YAML (docs/distillation.md)")
    add("--runs", type=_path, metavar="DIR", help="folder for run folders; default: runs/")
    add("--tracker", metavar="NAME", help="send the run to wandb or mlflow while it trains")
    add("--megatron", type=_path, metavar="PATH", help="a patched full Megatron-LM checkout to run")
    patch = "patch to leave out of the source; repeatable"
    add("--without-patch", metavar="NAME", help=patch, **_REPEATABLE)
    add("--no-fusions", action="store_true", help="leave out fused kernels, for comparisons")
    taken = "use CHECKPOINT even if another run seems to save there (docs/checkpoints.md)"
    add("--take-lock", action="store_true", help=taken)
    add("--allow-edits", action="store_true", help="run a tree that was edited by hand")
    add("--dry-run", action="store_true", help="print the command and the memory; do not train")
    names = ", ".join(DEVICES)
    add("--device", metavar="NAME", help=f"with --dry-run: the GPUs to plan for: {names}")


def _add_data(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    text = "your own text: .jsonl, .json or .parquet with a key text, .txt, .md; also .gz, .zst"
    add("--text", type=_path, metavar="FILE", nargs="+", action="extend", default=[], help=text)
    add("--strict", action="store_true", help="refuse a text with records that cannot be used")
    data = "the same as the argument DATA_PREFIX"
    add("--data", dest="data_option", type=_path, metavar="PREFIX", help=data)
    words = "the same as the argument TOKENIZER; default with --text: one that is trained on it"
    add("--tokenizer", dest="tokenizer_option", type=_path, metavar="FOLDER", help=words)


def _add_cluster(group: argparse._ArgumentGroup) -> None:
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    add = group.add_argument
    add("--nnodes", default=1, help=f"number of nodes; each needs a launcher {_DEFAULT}", **number)
    add("--node-rank", default=0, help=f"index of this node, from 0 {_DEFAULT}", **number)
    processes = "processes per node, one per GPU (default: all GPUs for standard and fast, else 1)"
    add("--nproc-per-node", help=processes, **number)
    address = f"address of node 0, for several nodes {_DEFAULT}"
    add("--master-addr", default="localhost", metavar="HOST", help=address)
    port = "port of node 0; default: torchrun's"
    add("--master-port", type=int, metavar="PORT", help=port)


def _add_types(parser: argparse.ArgumentParser, front_end: bool) -> None:
    if front_end:
        parser.add_argument(
            FA_MODE, dest="quantization", metavar="MODE", help="mode that quantizes only attention"
        )
        parser.set_defaults(
            front_end=True, gemms="fprop", linear_quantization=None, attention_quantization=None
        )
        parser.set_defaults(attention_gemms="forward")
        parser.add_argument("--without", help=argparse.SUPPRESS, **_REPEATABLE)
        parser.set_defaults(recipe=None, with_=[], allow_mostly_unquantized=False)
        return
    parser.set_defaults(front_end=False)
    which = f"GEMMs of linear layers to quantize: fprop, or all (also dgrad, wgrad) {_DEFAULT}"
    linear = "type of linear layers, overriding the mode: T or none"
    attention = (
        "types of attention, overriding the mode: T as in FA_T (QK), qk_T, pv_T, qk_pv_T or none"
    )
    add = parser.add_argument
    add(MODE, "--mode", metavar="MODE", help=f"a mode, or '{SOURCE}' for the types in the tree")
    add("--gemms", default="fprop", metavar="WHICH", help=which)
    backward = (
        "products of attention to quantize: forward, or all (also those of its backward pass)"
    )
    add("--attention-gemms", default="forward", metavar="WHICH", help=f"{backward} {_DEFAULT}")
    add("--linear-quantization", metavar="T", help=linear)
    add("--attention-quantization", metavar="T", help=attention)
    recipe = "recipe that sets how each operand of linear layers is quantized: a name of "
    add("--recipe", metavar="NAME", help=f"{recipe}`mqo recipe list`, or FILE.toml")
    few = "run a recipe that leaves most of the linear layers' FLOPs unquantized"
    add("--allow-mostly-unquantized", action="store_true", help=few)
    head = f"also quantize this layer with the recipe: {OUTPUT_LAYER}"
    add("--with", dest="with_", metavar="NAME", help=head, **_REPEATABLE)
    # Older command lines name a patch here.
    omitted = f"ingredient of the recipe to leave out: {', '.join(INGREDIENTS)}; repeatable"
    add("--without", metavar="NAME", help=omitted, **_REPEATABLE)


def machine_of(args: argparse.Namespace) -> Machine:
    """Return this machine, or the one to plan for if --device names it."""
    if args.device is None:
        return detect()
    if not args.dry_run:
        raise MqoError(
            "--device was given without --dry-run",
            expected="--dry-run with --device",
            help="Leave --device out to train on this machine's GPUs",
        )
    return imagined(args.device, args.nproc_per_node or GPUS_PER_NODE)


def config_from(
    args: argparse.Namespace, extra: list[str], machine: Machine | None = None
) -> RunConfig:
    """Return the run configuration of the arguments; an unknown name lists the valid ones.

    By default a run has one process per GPU of `machine`, which is this one if None.
    """
    if args.start is not None:
        extra = fill_in(args, extra, Project.here())
    # Before names of types are checked.
    own = OwnTypes.from_options(args.formats, args.plugin, args.plugin_option)
    data = _own_data(args, extra)
    mode = args.quantization
    given_types = (args.linear_quantization, args.attention_quantization, args.recipe)
    if mode is None and any(given_types):
        mode = tables.UNQUANTIZED  # these types change it
    for option, value in (
        ("--model", args.model),
        ("--dataset or --text", args.dataset or own_data(data.data_prefix, extra)),
        (FA_MODE if args.front_end else f"{MODE} or --recipe", mode),
    ):
        if value is None:
            raise MqoError(f"{option} is missing", help="--list shows all valid names")
    if args.front_end:
        tables.check_choice("quantization of attention", mode, _modes(front_end=True))
    tables.check_dtype(args.dtype)
    GemmChoice.of_names(args.gemms, args.attention_gemms)
    where = {name: getattr(args, name) for name in Cluster.model_fields}
    training = tables.pick(tables.trainings(), "training configuration", args.training_config)
    gpus = 0 if training.is_smoke else (machine or detect()).gpus
    where["nproc_per_node"] = args.nproc_per_node or max(1, gpus)
    recipe, without = _recipe(args)
    outputs = ("checkpoint", "tensorboard")
    plain = (
        *("dtype", "gemms", "attention_gemms", "name", "model_class", *outputs),
        *("teacher", "distillation_config", "megatron"),
    )
    config = resolve(
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
        plugins=own.plugins,
        plugin_options=own.options,
        shrink=shrink_of(args.shrink),
        start=args.start,
        schedule=tuple(args.schedule),
        extra_flags=(*(NO_FUSIONS if args.no_fusions else ()), *extra),
        **data.fields,
        **{name: getattr(args, name) for name in plain},
        **given(args),
    )
    own.refuse_unused([config.quantization])
    return config


def _own_data(args: argparse.Namespace, extra: Sequence[str]) -> OwnData:
    """Return the user's data; MqoError if an option and an argument give the same."""
    prefix = either("--data", args.data_option, "DATA_PREFIX", args.data_prefix)
    tokenizer = either("--tokenizer", args.tokenizer_option, "TOKENIZER", args.tokenizer)
    project = Project.here()
    return of_options(project, args.text, tokenizer, prefix, extra, strict=args.strict)


def _recipe(args: argparse.Namespace) -> tuple[Recipe | None, tuple[str, ...]]:
    """Return the recipe with its changes, and the patches to leave out."""
    ingredients = [name for name in args.without if name in INGREDIENTS]
    patches = [name for name in args.without if name not in INGREDIENTS]
    patches += args.without_patch
    recipe = recipes.chosen(args.recipe, ingredients, args.with_)
    if args.allow_mostly_unquantized and recipe is None:
        raise MqoError("--allow-mostly-unquantized was given without a recipe", expected="--recipe")
    return recipe, tuple(dict.fromkeys(patches))


def listing(front_end: bool = False) -> str:
    """Return all names by kind: first the modes with scripts, then patterns with a type T."""
    modes = tables.patterns(_modes(front_end))
    scripts = [mode.name for mode in tables.script_modes()]
    others = [name for name in (*modes, SOURCE) if name not in scripts]
    rows: dict[str, Iterable[str]] = {
        "models": tables.models(),
        "datasets": tables.datasets(),
        **(
            {"fa-quantizations": modes}
            if front_end
            else {_LISTED_MODES: scripts, "more quantizations, for each type T": others}
        ),
        "types T": tables.quant_types(),
        **({} if front_end else {"recipes": names()}),
        "training configs": tables.trainings(),
    }
    return "\n".join(
        f"{kind}:\n" + "".join(f"  {n}\n" for n in names) for kind, names in rows.items()
    )


def _modes(front_end: bool) -> list[str]:
    return [name for name, mode in tables.modes().items() if mode.front_end or not front_end]
