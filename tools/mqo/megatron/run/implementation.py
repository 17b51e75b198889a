"""Record which of upstream's norms, optimizers and fused operations a run uses.

Upstream chooses some of them by what imports, so two containers may compute differently.
"""

import importlib.util
import json
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from torch.nn import Module

from mqo.megatron.device import HAS_CUDA
from mqo.megatron.run.files import QUANTIZERS, run_folder
from mqo.megatron.run.modelopt import quantized_layers
from mqo.megatron.run.ranks import rank
from mqo.quant.collectives import all_ranks

_NEED_TRANSFORMER_ENGINE = ("transformer_engine", "inference_optimized")


class ImplementationError(RuntimeError):
    """The arguments select layers that are not available here."""


def check_available(args: Namespace) -> None:
    """Raise ImplementationError if `args` select Transformer Engine's layers and it is missing."""
    implementation = getattr(args, "transformer_impl", None)
    if implementation not in _NEED_TRANSFORMER_ENGINE:
        return
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        raise ImplementationError(
            f"--transformer-impl {implementation} needs Transformer Engine, and {_why_missing()}. "
            "Expected: a GPU, and a transformer_engine that imports. Use `--transformer-impl "
            "local` to run without it; `mqo doctor` shows what is installed"
        )


def _why_missing() -> str:
    if not HAS_CUDA:
        return "torch finds no CUDA device"
    try:
        spec = importlib.util.find_spec("transformer_engine")
    except ValueError:  # it is being imported, or was hidden
        spec = None
    return f"{spec.origin} does not import" if spec else "it is not installed"


def record(model: Iterable[Module], optimizer: Any) -> None:
    """Print what this run uses, and write it to its folder, if it has one. A collective.

    Args:
        model: this rank's chunks in the trainer.
        optimizer: upstream's, which may chain several.
    """
    folder = run_folder()
    if folder is None:
        return
    ranks = all_ranks(implementation_of(model, optimizer))
    kinds = dict.fromkeys(kind for names in ranks for kind in names)
    merged = {kind: sorted({n for names in ranks for n in names.get(kind, ())}) for kind in kinds}
    if rank() == 0:
        folder.implementation.write_text(json.dumps(merged, indent=1), encoding="utf-8")
        text = "; ".join(f"{kind} {', '.join(names) or 'none'}" for kind, names in merged.items())
        print(f"mqo: {text}", flush=True)


def implementation_of(model: Iterable[Module], optimizer: Any) -> dict[str, list[str]]:
    """Return {"norms", "optimizers", "fusions"}: classes as package.name, and enabled flags.

    QUANTIZERS are the libraries with enabled quantizers in this rank's layers, if any.
    """
    chunks = list(model)
    norms = {_name(m) for chunk in chunks for m in chunk.modules() if "Norm" in type(m).__name__}
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    steps = {_name(inner) for outer in chained if (inner := getattr(outer, "optimizer", None))}
    settings = [vars(config) for chunk in chunks if (config := getattr(chunk, "config", None))]
    fusions = {
        name for table in settings for name, on in table.items() if "fus" in name and on is True
    }
    names = {"norms": sorted(norms), "optimizers": sorted(steps), "fusions": sorted(fusions)}
    return names | ({QUANTIZERS: ["ModelOpt"]} if quantized_layers(chunks) else {})


def _name(thing: object) -> str:
    kind = type(thing)
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
