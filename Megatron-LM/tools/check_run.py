"""Check a run's flags with Megatron's parser, and list the layers of its model.

Nothing is trained, and no data is read.
"""

import contextlib
import io
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / ".mqo_runtime"), str(ROOT)]
import coverage

sys.path.pop(0)  # it would shadow the package coverage


def check(
    flags: list[str],
    model_flags: list[str],
    variables: dict[str, str],
    python_path: str,
    distills: bool,
    is_cpu: bool,
) -> dict[str, Any]:
    """Check the flags of a run; raise InferenceError for what would end it.

    Args:
        flags: those of the run.
        model_flags: those of its model on one process.
        variables: its environment variables, WORLD_SIZE among them.
        python_path: more folders to import from.
        distills: whether to accept the flags of a distillation.
        is_cpu: whether the run has no GPU.

    Returns:
        `layers`, {kind: names}; `sides`, {layer: how tensor parallelism splits its weight, "column"
        or "row"}; `traps`, {site: settings that would bypass its quantizer}; and `notes`, checks
        that were not possible.
    """
    coverage.take_over(coverage.Products())
    sys.path += filter(None, python_path.split(os.pathsep))
    os.environ |= variables
    from mqo.megatron.run.errors import InferenceError

    notes: list[str] = []
    args = parsed(flags, distills)
    try:
        validate(args)
    except InferenceError as error:
        if is_cpu:
            raise
        notes.append(f"without a GPU, Megatron's validation fails: {error}")
    traps = traps_of(args)
    layers, sides = layers_of(model_flags, notes)
    return {"layers": layers, "sides": sides, "traps": traps, "notes": notes}


def parsed(flags: list[str], distills: bool) -> Namespace:
    """Parse the flags; raise InferenceError if the parser refuses them."""
    from megatron.inference.arguments import add_modelopt_args
    from megatron.training import arguments
    from mqo.megatron.run.errors import InferenceError

    sys.argv[1:] = flags
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
            args = arguments.parse_args(add_modelopt_args if distills else None)
    except SystemExit:
        last = (output.getvalue().strip().splitlines() or ["no reason was given"])[-1]
        raise InferenceError(
            f"Megatron's parser refuses the flags: {last.partition('error: ')[2] or last}",
            "flags of pretrain_gpt.py after `--`",
            "Correct the flags; `--dry-run` shows the whole command",
        ) from None
    return args


def validate(args: Namespace) -> None:
    """Raise InferenceError if Megatron's validation, or the program, refuses the arguments."""
    from megatron.inference.gpt.batches import check_documents
    from megatron.training import arguments
    from mqo.megatron.run.errors import InferenceError
    from mqo.megatron.run.implementation import ImplementationError, check_available

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            arguments.validate_args(args)
        check_documents(args)
        check_available(args)
    except ImplementationError as error:
        raise InferenceError(str(error).rstrip(".")) from error
    except Exception as error:  # upstream's, of any type
        text = " ".join(str(error).split()) or "it gave no reason"
        raise InferenceError(
            f"Megatron's validation refuses the flags: {type(error).__name__}: {text}",
            "compatible flags",
            "Correct the flags after `--`; `--dry-run` shows the whole command",
        ) from error


def traps_of(args: Namespace) -> dict[str, list[str]]:
    """Return {site: the arguments that would bypass its quantizer}, for any type of the site.

    The key SITE:-output_layer is for runs that exclude the output layer.
    """
    from mqo.megatron.traps import setup_traps
    from mqo.quant.formats import SITES

    traps = {}
    for site in SITES:
        for name, excludes in ((site, False), (f"{site}:-output_layer", True)):
            traps[name] = setup_traps({site: "mixed"}, args, lambda *_, e=excludes: e)
    return traps


def layers_of(
    flags: list[str], notes: list[str]
) -> tuple[dict[str, list[str]] | None, dict[str, str]]:
    """Return {kind: layer names} and {layer: side}.

    If the model cannot be built here, return None instead of the names, and add a note.
    """
    from mqo.megatron import linear
    from mqo.megatron.layers import find_layers

    os.environ["WORLD_SIZE"] = "1"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            _, model = coverage.build([*flags, *coverage.ONE_RANK, *coverage.UNFUSED])
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        notes.append(
            f"the model cannot be built here ({type(error).__name__}: {text}), so layer patterns "
            "are only checked when the run starts"
        )
        return None, {}
    kinds: dict[str, list[str]] = {}
    sides: dict[str, str] = {}
    for layer, module, _ in find_layers(model):
        kinds.setdefault(layer.kind, []).append(layer.name)
        if side := linear.side(module):
            sides[layer.name] = side
    return {kind: sorted(names) for kind, names in kinds.items()}, sides
