"""Decorators that make functions of the user a type: its rounding, its state, its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from mqo.quant.plugin_rows import check_free
from mqo.quant.plugins import PLUGINS, Plugin, register_plugin
from mqo.quant.weights import weights_changed

F = TypeVar("F", bound=Callable[..., Any])


def quantizer(
    name: str,
    *,
    block: int | None = None,
    square: bool = False,
    needs_amax: bool = False,
    stochastic: bool = False,
    independent_rows: bool = False,
    options: Mapping[str, Any] | None = None,
    state: Mapping[str, float | list[float]] | None = None,
    estimator: bool = False,
    terms: int = 1,
    idempotent: bool = True,
    multiple: int = 1,
) -> Callable[[F], F]:
    """Make the decorated function a type with this name, wherever a type is named.

    The function takes a tensor x, float32 [rows, K], and a `QuantizerContext`, and returns the
    rounded x, of the same shape. The GEMM sums over K. It may return (values, alpha) instead, if
    the rounded x is alpha · values: alpha, a number, then multiplies the product of the GEMM. With
    `terms` it may return a list of such results, whose sum is the rounded x.

    Args:
        name: lower-case letters, digits and underscores.
        block: K is padded with zeros to a multiple of this, and with squares also the rows.
        square: whether it supports `tile = "square"`; the context says which tile is wanted.
        needs_amax: whether it reads `context.amax`.
        stochastic: whether it calls `context.rand`.
        independent_rows: whether it rounds each row without the others, amax apart. On a CPU it
            then gets pieces of x, on several threads, which is faster; not with squares.
        options: {name: default value}, a bool, int, float or str each. `context.options` has the
            values of a run; `--plugin-option NAME.OPTION=VALUE` sets one.
        state: {name: initial value}, a float or a list of at most 1,024 each, for every operand.
            `context.state` has the values of a step, and a function with `@end_step` the next ones.
        estimator: whether a function with `@estimator` computes the gradient of an operand, which
            otherwise passes straight through.
        terms: the largest number of terms of a result, at most 4. A linear layer adds the products
            of all pairs of terms in float32. Attention, grouped experts and Transformer Engine's
            layers get the sum, rounded to the dtype of the model.
        idempotent: whether a second rounding to nearest, with the same amax, changes nothing, which
            `mqo plugin check` tests. It is False for scales that depend on other statistics.
        multiple: what must divide K. Other sizes are refused: a run is before it starts, with the
            sizes of a tensor-parallel rank, and a call with `QuantizerError`.

    A run reads the arguments without running the file, so they must be literals there.

    Raises:
        ValueError: an argument is invalid, or the name is that of another type.
        TypeError: the name is missing.

    Examples:
        >>> @quantizer("halves", independent_rows=True)
        ... def halves(x, context):
        ...     return (2 * x).round() / 2
        >>> fake_quantize(torch.tensor([0.1, 0.3, 1.6]), "halves")
        tensor([0.0000, 0.5000, 1.5000])
    """

    if not isinstance(name, str):
        raise TypeError(f"the name of a quantizer is {name!r}; valid: @quantizer('name')")

    def register(function: F) -> F:
        check_free(name)
        flags = (block, square, needs_amax, stochastic, independent_rows)
        tables = (dict(options or {}), dict(state or {}))
        rest = (estimator, terms, idempotent, multiple)
        register_plugin(Plugin(name, *flags, *tables, *rest, function))
        weights_changed()  # cached ones may have been rounded by an older function
        return function

    return register


def end_step(name: str) -> Callable[[F], F]:
    """Make the decorated function compute the next state of a quantizer, above it in the file.

    The function takes {name: value} of the state and of the notes of an operand, float32 tensors on
    the CPU, the number of the step that ended, from 1, and {name: value} of the options. It returns
    the next state. It is called once per step for each operand that was rounded, on every rank with
    the same arguments.

    Raises:
        ValueError: there is no such quantizer, or it declares no state.

    Examples:
        >>> @quantizer("clipped", state={"limit": 4.0})
        ... def clipped(x, context):
        ...     context.note("limit", x.abs().amax())
        ...     limit = context.state["limit"]
        ...     return torch.minimum(torch.maximum(x, -limit), limit).round()
        >>> @end_step("clipped")
        ... def largest(state, notes, step, options):
        ...     return notes
    """

    def register(function: F) -> F:
        plugin = PLUGINS.get(name)
        if plugin is None or not plugin.state:
            raise ValueError(f"no quantizer '{name}' with a state; valid: @quantizer above it")
        register_plugin(replace(plugin, update=function))
        return function

    return register


def estimator(name: str) -> Callable[[F], F]:
    """Make the decorated function compute gradients for a quantizer, above it in the file.

    The function takes the gradient of the loss with respect to the rounded operand, the operand x,
    float32 [rows, K] both, and the context of the operand. It returns the gradient with respect to
    x. It is called in the backward pass, for the input and the weight of linear layers whose fprop
    rounds them with this quantizer. It must not read `context.amax` or call `context.rand`.

    Raises:
        ValueError: there is no such quantizer, or it does not declare an estimator.

    Examples:
        >>> @quantizer("sign", estimator=True)
        ... def sign(x, context):
        ...     return x.sign()
        >>> @estimator("sign")
        ... def inside(gradient, x, context):
        ...     return gradient * (x.abs() <= 1)
    """

    def register(function: F) -> F:
        plugin = PLUGINS.get(name)
        if plugin is None or not plugin.estimator:
            raise ValueError(
                f"no quantizer '{name}' with an estimator; valid: @quantizer above it, with "
                "estimator=True"
            )
        register_plugin(replace(plugin, estimate=function))
        return function

    return register
