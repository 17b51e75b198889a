"""Transformer Engine's layers, where the user's own flags for Megatron ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mqo.errors import LayoutError
from mqo.launch.command import read_flags
from mqo.matrix.tables import LINEAR_SITES, NONE
from mqo.megatron.transformer_engine import releases

NAME = releases.NAME
# What follows all other flags where a program is to take local layers none the less.
LOCAL = ("--transformer-impl", "local")


def is_asked(extra_flags: Sequence[str]) -> bool:
    """Return whether the user's flags ask for Transformer Engine's layers."""
    try:
        found = read_flags(extra_flags, {"transformer-impl": "local"})
    except LayoutError:  # without a value: upstream says so
        return False
    return found.transformer_impl == NAME


def flags(
    extra_flags: Sequence[str], types: Mapping[str, str] | None, schedule: Sequence[str]
) -> list[str]:
    """Return the flags that have Transformer Engine's layers ask for our quantizers.

    None without its layers, and none without a type of linear layers; `types` None are unknown.
    """
    typed = types is None or any(types.get(site, NONE) != NONE for site in LINEAR_SITES["all"])
    return list(releases.FLAGS) if is_asked(extra_flags) and (typed or schedule) else []
