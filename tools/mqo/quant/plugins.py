"""Quantizers of users: functions in Python that are types, like the formats of formats.toml.

This module imports only the standard library, because commands do not load torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    # Of x and its QuantizerContext.
    Function = Callable[[Tensor, Any], Tensor | tuple[Tensor, float | Tensor]]

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_BLOCKS = range(1, 4097)


def is_name(name: str) -> bool:
    """Return whether a quantizer may have this name."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class Plugin:
    """A quantizer and what it declares; `plugin_calls.quantizer` explains the fields."""

    name: str
    function: Function
    block: int | None = None
    square: bool = False
    needs_tensor_amax: bool = False
    stochastic: bool = False
    independent_rows: bool = False

    # The attributes of `Format` that specs and plots read.
    is_mx = False
    light = "#808080"

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ValueError(
                f"invalid name {self.name!r} of a quantizer; valid: lower-case letters, digits and "
                "_, beginning with a letter"
            )
        if self.block is not None and (type(self.block) is not int or self.block not in _BLOCKS):
            raise ValueError(f"invalid block {self.block!r} of {self.name}; valid: 1 to 4096")
        if self.square and self.block is None:
            raise ValueError(f"{self.name} has squares, and no block; valid: square with a block")

    @property
    def rounding(self) -> str:
        """The rounding of its specs: it decides whether a seed is needed."""
        return "stochastic" if self.stochastic else "nearest-even"


PLUGINS: dict[str, Plugin] = {}
_registered = 0


def register_plugin(plugin: Plugin) -> None:
    """Make a quantizer a type, in place of an older one with the same name."""
    global _registered
    _registered += 1
    PLUGINS[plugin.name] = plugin


def registrations() -> int:
    """Return the number of calls of `register_plugin`: what was read before may be outdated."""
    return _registered
