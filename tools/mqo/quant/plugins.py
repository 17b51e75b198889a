"""Quantizers of users: functions in Python that are types, like the formats of formats.toml.

This module imports only the standard library, because commands do not load torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from mqo.quant.plugin_calls import QuantizerContext

    Function = Callable[[Tensor, QuantizerContext], Tensor | tuple[Tensor, float | Tensor]]

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_BLOCKS = range(1, 4097)

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Plugin:
    """What a quantizer declares; `function` computes it. `quantizer` explains the fields."""

    name: str
    function: Function
    block: int | None = None
    square: bool = False
    needs_tensor_amax: bool = False
    stochastic: bool = False
    independent_rows: bool = False

    # The attributes of `Format` that specs and plots read.
    is_mx = False
    scale = "plugin"
    light = dark = "#808080"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
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


def quantizer(
    name: str,
    *,
    block: int | None = None,
    square: bool = False,
    needs_amax: bool = False,
    stochastic: bool = False,
    independent_rows: bool = False,
) -> Callable[[F], F]:
    """Make the decorated function a type with this name, wherever a type is named.

    The function takes a tensor x, float32 [rows, K], and a `QuantizerContext`, and returns the
    rounded x, of the same shape. The GEMM sums over K. It may return (values, alpha) instead, if
    the rounded x is alpha · values: alpha, a number, then multiplies the product of the GEMM.

    Args:
        name: lower-case letters, digits and underscores.
        block: K is padded with zeros to a multiple of this, and with squares also the rows.
        square: whether it supports `tile = "square"`; the context says which tile is wanted.
        needs_amax: whether it reads `context.amax`.
        stochastic: whether it calls `context.rand`.
        independent_rows: whether it rounds each row without the others, amax apart. On a CPU it
            then gets pieces of x, on several threads, which is faster; not with squares.

    Raises:
        ValueError: an argument is invalid, or the name is that of another type.
    """

    def register(function: F) -> F:
        from mqo.quant import formats

        if name in formats.QUANT_TYPES:
            raise ValueError(f"'{name}' is the name of a type of mqo; valid: another name")
        PLUGINS[name] = Plugin(
            name, function, block, square, needs_amax, stochastic, independent_rows
        )
        return function

    return register
