"""Refuse Megatron's own flags that have no effect in a run, or that select another model."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from mqo.errors import MqoError
from mqo.launch import engine
from mqo.launch.command import flag_table
from mqo.matrix.layer_pattern import FLAG as PATTERN

# Flags that only the layers of Transformer Engine or Kitchen read.
PRECISION = re.compile(
    r"--(fp8-.*|fp4-.*|te-precision-config-file|kitchen-.*|use-kitchen.*|first-last-layers-bf16"
    r"|num-layers-at-(start|end)-in-bf16|(no-)?keep-fp8-transpose-cache"
    r"|reuse-grad-buf-for-mxfp8-param-ag|moe-router-padding-for-(fp8|quantization)"
    r"|activation-func-fp8-input-store|(no|disable)-fp8-wgrad|quant-recipe.*)"
)
# {flags: the flags of which at least one must be set for them to have an effect}
_NEEDS = {
    r"--fp8-(?!format$|param-gather$).*": ("--fp8-format",),
    r"--fp4-(?!format$).*": ("--fp4-format",),
    r"--fp8-param-gather|--first-last-layers-bf16": ("--fp8-format", "--fp4-format"),
    r"--num-layers-at-(start|end)-in-bf16": ("--first-last-layers-bf16",),
}
# Flags of a HybridModel besides its pattern, and upstream's older names for that.
HYBRID = re.compile(r"--((mtp-)?hybrid-(?!context-parallel).*|is-hybrid-model|mamba-.*)")


class FlagError(MqoError):
    """A flag of Megatron has no effect, or selects a model that this program does not train."""


def check_flags(extra_flags: Sequence[str], added: Sequence[str] = ()) -> None:
    """Raise FlagError for the first flag after `--` that would be accepted and ignored.

    `added` are flags that the launcher adds for Transformer Engine's layers.
    """
    names = flag_table(extra_flags)
    if hybrid := _first(HYBRID, names):
        raise FlagError(
            f"{hybrid} was given, but a HybridModel is configured by its pattern of layers",
            expected=f"{PATTERN}, or --model FILE.toml with the sizes of Mamba layers",
            help=f"Leave {hybrid} out",
        )
    if not (flag := _first(PRECISION, names)):
        return
    if not engine.is_asked(extra_flags):
        raise FlagError(
            f"{flag} changes nothing: only layers of Transformer Engine read it, and this run has "
            "local layers",
            expected="a mode, a recipe or a rule for the precision of local layers",
            help=f"Leave {flag} out, or pass --transformer-impl {engine.NAME} after `--`",
        )
    for flag, pattern in itertools.product(filter(PRECISION.fullmatch, names), _NEEDS):
        needed = _NEEDS[pattern]
        if re.fullmatch(pattern, flag) and not {*names, *added} & {*needed}:
            raise FlagError(
                f"{flag} changes nothing without {' or '.join(needed)}",
                expected=" or ".join(needed),
                help=f"Leave {flag} out, or add a flag that it needs",
            )


def _first(pattern: re.Pattern, names: Iterable[str]) -> str | None:
    return next(filter(pattern.fullmatch, names), None)
