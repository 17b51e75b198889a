"""Detect whether the user's flags select Transformer Engine's layers, and add flags for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mqo.errors import LayoutError
from mqo.launch.command import read_flags
from mqo.matrix.tables import LINEAR_SITES, NONE
from mqo.megatron.transformer_engine import releases

NAME = releases.NAME
# Appended to all other flags, makes a program use local layers in any case.
LOCAL = ("--transformer-impl", "local")


def is_asked(extra_flags: Sequence[str]) -> bool:
    """Return whether the user's flags select Transformer Engine's layers."""
    try:
        values = read_flags(extra_flags, {"transformer-impl": "local"})
    except LayoutError:  # the value is missing, which upstream reports
        return False
    return values.transformer_impl == NAME


def flags(
    extra_flags: Sequence[str], types: Mapping[str, str] | None, schedule: Sequence[str]
) -> list[str]:
    """Return the flags that make Transformer Engine's layers use our quantizers.

    The list is empty without its layers, or if no linear layer has a type. `types` is None if they
    are unknown.
    """
    typed = types is None or any(types.get(site, NONE) != NONE for site in LINEAR_SITES["all"])
    return list(releases.FLAGS) if is_asked(extra_flags) and (typed or schedule) else []
