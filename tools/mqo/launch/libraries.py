"""Find what ModelOpt and Transformer Engine quantize in a run.

Both quantize inside their own layers, so the sites in the source do not show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from mqo.errors import MqoError
from mqo.launch.checkpoints import describe, newest
from mqo.launch.command import flag_table
from mqo.megatron.run.files import MODELOPT_STATE, TRACKER, iteration_folder
from mqo.megatron.transformer_engine import releases
from mqo.quant import formats

MODELOPT, TRANSFORMER_ENGINE = "ModelOpt", "Transformer Engine"
UNNAMED = "an unnamed format"  # of a checkpoint that was quantized by a foreign program
# {operand of a linear layer's GEMMs: ModelOpt's name of its quantizer}
_QUANTIZERS = {"x": "input_quantizer", "weight": "weight_quantizer", "grad": "grad_quantizer"}


class LibraryQuantization(BaseModel):
    """What a library quantizes in the linear layers of a run.

    `format` is the library's name for it. `rules` are pairs of a glob of LAYER.QUANTIZER and
    whether it is on; the last match counts. Without rules the quantized layers are unknown.
    """

    model_config = ConfigDict(frozen=True)

    library: str
    format: str
    rules: tuple[tuple[str, bool], ...] = ()

    @property
    def label(self) -> str:
        """Return the text for tables: 'int8 by ModelOpt'."""
        return label(self.library, self.format)

    def plain_operands(self, layer: str, gemm: str) -> tuple[str, ...]:
        """Return the operands of a linear layer's GEMM that the library leaves unquantized."""
        site = formats.SITES[gemm]
        return tuple(name for name in (site.lhs, site.rhs) if not self._is_on(layer, name))

    def _is_on(self, layer: str, operand: str) -> bool:
        name = f"{layer}.{_QUANTIZERS[operand]}"
        return next((on for glob, on in reversed(self.rules) if fnmatchcase(name, glob)), False)


def label(library: str, format: str) -> str:
    """Return a library's format, for tables."""
    return f"{format} by {library}"


def library_labels(types: Mapping[str, str]) -> list[str]:
    """Return the labels of the entries of a run's types that belong to a library."""
    return [label(name, kind) for name, kind in types.items() if name not in formats.SITES]


# -- Transformer Engine ----------------------------------------------------------------------------


def engine_quantization(flags: Sequence[str], num_layers: int) -> LibraryQuantization | None:
    """Return what Transformer Engine's own recipe quantizes; None if no flag requests one.

    Also None if the flags request our quantizers: then the run's mode sets what is quantized.
    """
    given = flag_table(flags)
    ours = flag_table(releases.FLAGS)
    if given.get("--transformer-impl") != releases.NAME:
        return None
    if all(given.get(name) == ours[name] for name in ("--fp8-recipe", "--fp8-quantizer-factory")):
        return None
    parts = [
        " ".join(filter(None, (kind, format, given.get(f"--{kind}-recipe", ""))))
        for kind in ("fp8", "fp4")
        if (format := given.get(f"--{kind}-format"))
    ]
    config = "--te-precision-config-file"
    if config in given:
        parts.append(f"layers as in {Path(given[config]).name}")
    if not parts:
        return None
    rules = () if config in given else tuple(_engine_rules(given, num_layers))
    return LibraryQuantization(library=TRANSFORMER_ENGINE, format=", ".join(parts), rules=rules)


def _engine_rules(given: Mapping[str, str], num_layers: int) -> list[tuple[str, bool]]:
    """Return the rules of a recipe, which quantizes all linear layers of the blocks."""
    rules = [("*", True), ("output_layer.*", "--fp8-output-proj" in given)]
    if "--first-last-layers-bf16" in given:
        counts = (given.get(f"--num-layers-at-{end}-in-bf16", "1") for end in ("start", "end"))
        first, last = (int(text) if text.isdecimal() else 1 for text in counts)
        plain = [*range(first), *range(num_layers - last, num_layers)]
        rules += [(f"decoder.layers.{layer}.*", False) for layer in plain]
    return rules


# -- ModelOpt --------------------------------------------------------------------------------------


def modelopt_quantization(
    tree: Path, checkpoints: Path | None, extra_flags: Sequence[str]
) -> LibraryQuantization | None:
    """Return what ModelOpt quantizes in the checkpoint that a run loads; None if nothing.

    Args:
        tree: the Megatron whose program reads the state.
        checkpoints: the run's folder for checkpoints, if it loads from one.
        extra_flags: the user's flags for Megatron, which may name another folder.
    """
    folder = _loaded(checkpoints, flag_table(extra_flags))
    if folder is None or not (folder / MODELOPT_STATE).is_dir():
        return None
    unknown = LibraryQuantization(library=MODELOPT, format=UNNAMED)
    try:
        facts = describe(tree, folder)["modelopt"]
        if facts is None:
            return None
        known = {name: value for name, value in facts.items() if value}
        return LibraryQuantization.model_validate(unknown.model_dump() | known)
    except (MqoError, ValueError):  # the training loads an older checkpoint, or reports the fault
        return unknown


def _loaded(checkpoints: Path | None, given: Mapping[str, str]) -> Path | None:
    """Return the folder of the iteration that Megatron would load for a run."""
    folder = Path(given["--load"]) if given.get("--load") else checkpoints
    pretrained = given.get("--pretrained-checkpoint")
    if pretrained and not (folder and (folder / TRACKER).is_file()):
        folder = Path(pretrained)
    step = (given.get("--ckpt-step") or newest(folder)) if folder else None
    return iteration_folder(folder, step) if folder and step else None
