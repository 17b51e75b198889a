"""Call a custom quantizer, and check what it returns."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from mqo.quant.plugin_context import CallSite, QuantizerContext, QuantizerError, Random, uniform
from mqo.quant.plugins import PLUGINS, Plugin
from mqo.quant.rounded import Rounded
from mqo.quant.spec import QuantSpec
from mqo.quant.stochastic import split_seed
from mqo.quant.tensor_amax import largest

Values = tuple[Tensor, float]  # of a term, and its alpha

_PIECE = 2**15  # elements of a piece, which stay in a core's cache
_NO_SITE = CallSite()
_worker = threading.local()


def call(
    x: Tensor,
    spec: QuantSpec,
    axis: int,
    seed: int | None,
    amax: Tensor | None,
    site: CallSite = _NO_SITE,
) -> Rounded:
    """Return `x` rounded by the quantizer that `spec` names.

    `site` is the operand; the other arguments are those of `fake_quantize`.

    Raises:
        QuantizerError: the quantizer does not accept the size along `axis`, or its function raised
            an error or returned no tensor of x's shape; the text names the operand.
    """
    plugin = PLUGINS[spec.quant_type]
    # Without elements, such as for an expert without tokens, there is nothing to round.
    if not x.numel() or x.is_meta or isinstance(x, FakeTensor):
        return Rounded(torch.empty_like(x), amax)
    if plugin.function is None:
        raise QuantizerError(
            f"the function of the quantizer {plugin.name} is unknown, because its file was not "
            "run; valid: load_quantizers(FILE) first"
        )
    for is_declared, function, word in (
        (plugin.state, plugin.update, "end_step"),
        (plugin.estimator, plugin.estimate, "estimator"),
    ):
        if is_declared and function is None:
            raise QuantizerError(
                f"the quantizer {plugin.name} has no function with @{word}('{plugin.name}'), which "
                "it declares; valid: such a function below it"
            )
    context = QuantizerContext.begin(plugin, spec, site, x.device)
    size = x.shape[axis] if x.dim() else 1
    if fault := plugin.size_fault(size):
        raise QuantizerError(f"{context.describe()} has {size} elements per row, and {fault}")
    rows = own_rows(x, axis, plugin.block, spec.tile)
    if not plugin.needs_tensor_amax:
        amax = None
    elif amax is None:
        amax = largest(x)
    context = replace(context, _amax=amax)
    if plugin.stochastic:
        assert seed is not None  # `check_arguments` checks it
        context = replace(context, _random=_random(x, axis, rows.shape, seed, site.shared_seed))
    terms = _rounded(plugin, rows, context)
    if site.states and plugin.state:
        site.states.note(plugin, site.key, context._notes)
    first, *rest = (Rounded(from_blocks(values, x, axis), amax, alpha) for values, alpha in terms)
    return first._replace(rest=tuple(rest))


def _random(x: Tensor, axis: int, padded: torch.Size, seed: int, shared_seed: int | None) -> Random:
    """Return the random numbers of `x`, which has the shape `padded` as rows of whole blocks."""
    elements = as_rows(uniform(x.shape, seed, x.device), axis)
    if elements.shape != padded:
        rows, size = elements.shape
        wide = uniform(padded, split_seed(seed, 0), x.device)
        wide[:rows, :size] = elements
        elements = wide
    seeds = map(partial(split_seed, seed), itertools.count(1))
    return Random(elements, seeds, split_seed(seed, -1) if shared_seed is None else shared_seed)


def _rounded(plugin: Plugin, x: Tensor, context: QuantizerContext) -> list[Values]:
    """Return the terms of `x`, in pieces on threads where that is faster."""
    size = max(1, _PIECE // max(1, x.shape[1]))
    in_pieces = plugin.independent_rows and context.tile == "row" and x.device.type == "cpu"
    if not in_pieces or x.shape[0] <= size or getattr(_worker, "is_one", False):
        return _result(plugin, x, context)
    starts = range(0, x.shape[0], size)
    pieces = [(x[i : i + size], context.of_rows(slice(i, i + size))) for i in starts]
    results = list(_threads().map(lambda piece: _result(plugin, *piece)[0], pieces))
    alphas = {repr(alpha): alpha for _, alpha in results}  # a NaN equals itself
    if len(alphas) > 1:
        raise QuantizerError(
            f"the quantizer {plugin.name} returned several alphas for {context.describe()}; valid: "
            "the same for all rows, or independent_rows=False"
        )
    return [(torch.cat([values for values, _ in results]), results[0][1])]


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return as many threads as torch has, in which an operation of torch uses one."""
    count = torch.get_num_threads()
    started = threading.Barrier(count + 1)
    pool = ThreadPoolExecutor(count, initializer=_start_worker)
    for _ in range(count):
        pool.submit(started.wait)
    started.wait()
    torch.set_num_threads(count)  # the workers changed it for threads that start later, too
    return pool


def _start_worker() -> None:
    _worker.is_one = True
    torch.set_num_threads(1)


# A forked process has none of these threads.
os.register_at_fork(after_in_child=_threads.cache_clear)


def own_rows(x: Tensor, axis: int, block: int | None, tile: str) -> Tensor:
    """Return `x` as float32 rows of whole blocks, to which a function of the user may write."""
    # In one memory order, because sums of torch depend on it.
    rows = to_blocks(as_rows(x, axis).float(), block, tile).contiguous()
    is_view = rows.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    return rows.clone() if is_view else rows


def as_rows(x: Tensor, axis: int) -> Tensor:
    """Return `x` as [rows, K], K along `axis`."""
    moved = x.movedim(axis, -1) if x.dim() else x.reshape(1)
    return moved.flatten(0, -2) if moved.dim() > 1 else moved.unsqueeze(0)


def to_blocks(x: Tensor, block: int | None, tile: str) -> Tensor:
    """Return rows padded with zeros to whole blocks."""
    if block is None:
        return x
    rows = -x.shape[0] % block if tile == "square" else 0
    return functional.pad(x, (0, -x.shape[1] % block, 0, rows))


def from_blocks(values: Tensor, x: Tensor, axis: int) -> Tensor:
    """Return the values of `to_blocks(as_rows(x, axis))` in the shape and the dtype of x."""
    shape = x.movedim(axis, -1).shape if x.dim() else x.shape
    width = shape[-1] if x.dim() else 1
    values = values[: x.numel() // max(1, width), :width].to(x.dtype).reshape(shape)
    return (values.movedim(-1, axis) if x.dim() else values).contiguous()


def _result(plugin: Plugin, x: Tensor, context: QuantizerContext) -> list[Values]:
    """Return the terms that the function returns, checked."""
    assert plugin.function is not None  # `call` checks it
    result = run_function(f"the quantizer {plugin.name}", plugin.function, x, context)
    terms = result if isinstance(result, list) else [result]
    if not 1 <= len(terms) <= plugin.terms:
        raise QuantizerError(
            f"the quantizer {plugin.name} returned {len(terms)} terms for {context.describe()}; "
            f"valid: 1 to {plugin.terms}, which it declares"
        )
    return [_checked(plugin, term, x, context) for term in terms]


def _checked(plugin: Plugin, term: Any, x: Tensor, context: QuantizerContext) -> Values:
    values, alpha = term if isinstance(term, tuple) and len(term) == 2 else (term, 1.0)
    if not isinstance(values, Tensor) or values.shape != x.shape:
        shown = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise QuantizerError(
            f"the quantizer {plugin.name} returned {shown} for {context.describe()}; valid: a "
            f"tensor {list(x.shape)}, or (tensor, alpha)"
        )
    return values, float(alpha)


def run_function(subject: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function of the user; the last argument is the context.

    Raises:
        QuantizerError: it raised an error; the text names the operand, the shape and the line.
    """
    x, context = arguments[0], arguments[-1]
    try:
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            return function(*arguments)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        file, code = inspect.getfile(function), cast(FunctionType, function).__code__
        own = [frame.lineno for frame in frames if frame.filename == file]
        # Without a frame of its own it was not entered, because it takes other arguments.
        line = own[-1] if own else code.co_firstlineno
        raise QuantizerError(
            f"{subject} failed on {context.describe()}, {list(x.shape)}, in line {line} of {file}: "
            f"{type(error).__name__}: {error}"
        ) from error
