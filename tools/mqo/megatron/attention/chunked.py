"""Compute attention with quantized probabilities, one chunk of queries at a time.

A chunk has whole rows of scores, so its softmax and its quantized probabilities equal those of the
unfused path. The next chunk reuses its buffers. The backward pass recomputes the chunks. Matrix
products are torch's own, on every device.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from math import lcm, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mqo.megatron.attention.backward import BackwardOperands, Heads, saved
from mqo.megatron.attention.chunks import HIDDEN, Chunk, ChunkPlan, Visible
from mqo.megatron.attention.operands import KeyOperand, QueryOperand, by_matrix
from mqo.quant import products
from mqo.quant.gemms import GemmOperands
from mqo.quant.hadamard import SignedHadamard
from mqo.quant.parts import OperandParts
from mqo.quant.products import Alphas, bmm
from mqo.quant.slices import Sliced
from mqo.quant.tensor_amax import largest


@dataclass(frozen=True)
class Scores:
    """How scores become probabilities.

    scale: factor of query times key. factor: factor of the scores in the softmax. dtype: dtype of
    the softmax; None for that of the scores. normalized: whether probabilities are quantized after
    the division by the sum of the row; before it, the largest in a row is 1. turn: the transform of
    query and key.
    """

    scale: float
    factor: float | None = None
    dtype: torch.dtype | None = None
    normalized: bool = True
    turn: SignedHadamard | None = None


@dataclass(frozen=True)
class Settings:
    """How attention is computed in chunks.

    scores: their scale, and the settings of the softmax. visible: the keys that each query sees.
    probs: quantizes the probabilities, [b * np, sq, sk]; gradients pass straight through. qk: the
    factors of query and key. pv: those of probabilities and value. backward: the quantizers of the
    backward pass's products; if dv or dk has a type, `visible` is one span of all queries.
    """

    scores: Scores
    visible: Visible
    probs: OperandParts
    qk: Alphas
    pv: Alphas
    backward: BackwardOperands


def chunked_attention(rounded: Heads, unrounded: Heads, settings: Settings) -> Tensor:
    """Compute attention of grouped queries in Megatron's layout, differentiable once.

    Args:
        rounded: query [sq, b, np, hn], key [sk, b, ng, hn] and value [sk, b, ng, hv], quantized; np
            is a multiple of ng, and hv may differ from hn. A transform pads hn of both; that of the
            probabilities pads sk of the value.
        unrounded: the same before they were quantized, which get the gradients.
        settings: the rest.

    Returns:
        [sq, b, np * hv].
    """
    return _Chunked.apply(*unrounded, *(tensor.detach() for tensor in rounded), settings)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> Tensor:
        *heads, settings = tensors
        unrounded, rounded = Heads(*heads[:3]), Heads(*heads[3:])
        query, key, value = map(Sliced, rounded)
        probs = settings.probs
        work = _Work((query, key, value), settings, [probs], probs.is_watched)
        work.find_amaxes([settings.pv])
        probs = work.parts[0]
        ctx.settings = replace(settings, probs=probs)
        ctx.features = unrounded.query.size(-1)
        out = rounded.query.new_empty(*rounded.query.shape[:3], rounded.value.size(-1))
        rows = by_matrix(out, work.groups)
        for chunk in work.plan.chunks():
            probabilities = work.probabilities(chunk)
            first = chunk.first * work.plan.repeats
            probs.observe(probabilities.exact, probabilities.rounded, first, chunk.start)
            work.put(rows, chunk, work.context(chunk, probabilities))
        if not settings.backward.dp.has_type:  # no chunk reads the values any more
            rounded = rounded._replace(value=_undone(probs.turn, rounded.value, 0))
        settings.backward.save(ctx, rounded, unrounded)
        return out.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        work = _Gradients(*saved(ctx), grad, ctx.features, ctx.settings)
        for chunk in work.plan.chunks():
            work.add(chunk)
        return (*work.sums(), None, None, None, None)


class _Probabilities(NamedTuple):
    """The probabilities of a chunk, valid until the next chunk is computed.

    softmax: in the dtype of the softmax, [matrices, repeats, queries, keys]. exact: before
    rounding, [heads, queries, keys]. rounded: of the same shape, or padded by a transform. row: a
    factor for each row of `rounded`, [matrices, repeats * queries, 1], or None.
    """

    softmax: Tensor
    exact: Tensor
    rounded: Tensor
    row: Tensor | None


class _Work:
    """The operands by matrix, and the buffers that all chunks share.

    `parts` quantize the probabilities, and then what a subclass adds.
    """

    def __init__(
        self,
        operands: tuple[Sliced, Sliced, Sliced],
        settings: Settings,
        parts: list[OperandParts],
        whole: bool,
        row_block: int = 1,
    ) -> None:
        query, key, value = operands
        (queries, batch, heads, _), (keys, _, groups, _) = query.tensor.shape, key.tensor.shape
        self.settings, self.groups, self.parts = settings, groups, parts
        self.plan = ChunkPlan(
            matrices=batch * groups,
            repeats=heads // groups,
            queries=queries,
            keys=keys,
            visible=settings.visible,
            block=lcm(*(operand.block for operand in parts)),
            row_block=lcm(row_block, *(operand.row_block for operand in parts)),
            device=query.tensor.device.type,
            whole=whole or any(operand.needs_whole_rows for operand in parts),
        )
        self.query = QueryOperand(query, groups, axis=-1)
        self.key, self.value = (KeyOperand(side, groups, axis=-1) for side in (key, value))
        self.dtype = settings.scores.dtype or query.tensor.dtype
        space = query.tensor.new_empty
        new = max(prod(operand.padded(self.plan.shape)) for operand in parts)
        # Scores, later rounded probabilities; unrounded probabilities; buffers of the softmax.
        self._scores, self._probs = space(new), space(new)
        self._input, self._softmax = self._scores, self._probs
        if self.dtype != query.tensor.dtype:
            self._input, self._softmax = space(2, new, dtype=self.dtype)
        elif not settings.scores.normalized:
            self._softmax = space(new)

    def put(self, rows: Tensor, chunk: Chunk, values: Tensor) -> None:
        """Write [matrices, repeats * queries, d] to the rows of a chunk from `by_matrix`."""
        part = rows[chunk.first : chunk.last, :, chunk.start : chunk.stop]
        part.copy_(values.view(part.shape))

    def context(self, chunk: Chunk, probabilities: _Probabilities) -> Tensor:
        """Return the product of the rounded probabilities and the values."""
        rounded = self.by_group(chunk, probabilities.rounded)
        context = bmm(rounded, self.value.take(chunk, rounded.size(-1)), self.settings.pv.both)
        return context if probabilities.row is None else context.mul_(probabilities.row)

    def by_group(self, chunk: Chunk, tensor: Tensor) -> Tensor:
        """View a chunk's scores as [matrices, repeats * queries, keys]."""
        return tensor.view(chunk.last - chunk.first, -1, tensor.size(-1))

    def space(self, buffer: Tensor, chunk: Chunk, parts: OperandParts | None = None) -> Tensor:
        """Return the part of a buffer for a chunk's scores, [matrices, repeats, queries, keys].

        With `parts` it has the shape that they quantize to.
        """
        rows, keys = chunk.stop - chunk.start, chunk.high - chunk.low
        shape = [chunk.last - chunk.first, self.plan.repeats, rows, keys]
        shape = list(parts.padded(shape)) if parts else shape
        return buffer[: prod(shape)].view(shape)

    def exact(self, chunk: Chunk) -> Iterator[tuple[OperandParts, Tensor, Tensor]]:
        """Yield for each of `parts` what it quantizes, and a free buffer for the result."""
        yield self.parts[0], self.probabilities(chunk, is_rounding=False).exact, self._scores

    def find_amaxes(self, alphas: list[Alphas]) -> None:
        """Find the amaxes that `parts` lack, from a pass over all chunks; wait for the device.

        `alphas` are those of their products.
        """
        lacking = [i for i, parts in enumerate(self.parts) if parts.lacks_amax]
        if not lacking:
            return
        rows = []
        for chunk in self.plan.chunks():
            row = []
            for parts, exact, buffer in islice(self.exact(chunk), lacking[-1] + 1):
                out = self.space(buffer, chunk, parts).flatten(0, 1)
                row.append(largest(parts.turned(exact, out)))
            rows.append(torch.stack(row))
        amaxes = torch.stack(rows).amax(0)
        for i in lacking:
            self.parts[i] = self.parts[i].with_amax(amaxes[i])
            alphas[i].lhs = self.parts[i].alpha or 1.0

    def probabilities(self, chunk: Chunk, is_rounding: bool = True) -> _Probabilities:
        """Return a chunk's probabilities, exact and rounded; without rounding twice the exact."""
        scores = self.space(self._scores, chunk)
        query, keys = self.query.take(chunk), self.key.take(chunk)
        scale, alpha = self.settings.scores.scale, self.settings.qk.both
        products.scores(
            *(query, keys.transpose(1, 2), scale, alpha), out=self.by_group(chunk, scores)
        )
        taken = self.space(self._input, chunk)
        if taken.dtype != scores.dtype:
            taken.copy_(scores)
        if self.settings.scores.factor is not None:
            taken.mul_(self.settings.scores.factor)
        self._hide(chunk, taken)
        softmax = torch.softmax(taken, -1, out=self.space(self._softmax, chunk))
        exact, row = self.space(self._probs, chunk), None
        if not self.settings.scores.normalized:
            largest = softmax.amax(-1, keepdim=True)  # the softmax at the maximum of the row
            torch.div(softmax, largest, out=taken)
            exact.copy_(taken)
            row = largest.flatten(1, 2)
        elif exact.dtype != softmax.dtype:
            exact.copy_(softmax)
        exact = rounded = exact.flatten(0, 1)
        matrix, parts = chunk.first * self.plan.repeats, self.parts[0]
        if is_rounding:
            out = self.space(self._scores, chunk, parts).flatten(0, 1)
            rounded = parts.quantize(exact, matrix, chunk.start, out=out)
        return _Probabilities(softmax, exact, rounded, row)

    def _hide(self, chunk: Chunk, scores: Tensor) -> None:
        """Set the scores of hidden keys to the value that upstream uses."""
        scores[..., : chunk.before] = HIDDEN
        if chunk.later:
            size = chunk.stop - chunk.start, chunk.later
            later = torch.ones(size, dtype=torch.bool, device=scores.device).triu_()
            scores[..., -chunk.later :].masked_fill_(later, HIDDEN)
        hidden = self.hidden(chunk)
        if hidden is not None:
            scores.masked_fill_(hidden, HIDDEN)

    def hidden(self, chunk: Chunk) -> Tensor | None:
        """Return the mask of a chunk, in the width of `space`; None without a mask."""
        mask = self.settings.visible.mask
        if mask is None:
            return None
        hidden = mask[:, :, chunk.start : chunk.stop, chunk.low : chunk.high]
        if mask.size(0) == 1:
            return hidden
        of_matrix = torch.arange(chunk.first, chunk.last, device=mask.device)
        return hidden[of_matrix // self.groups]


class _Gradients(_Work):
    """Sum the gradients of all three operands, chunk by chunk, at least in float32.

    backward.py says what each product multiplies.
    """

    def __init__(
        self, rounded: Heads, unrounded: Heads, grad: Tensor, features: int, settings: Settings
    ) -> None:
        sites, pv, turn = settings.backward, settings.pv, settings.scores.turn
        query, key, of_scores = _pair(sites.qk_recompute, rounded[:2], unrounded[:2], settings.qk)
        (queries, batch, heads, _), (keys, _, groups, _) = query.tensor.shape, key.tensor.shape
        grad = grad.unflatten(2, (heads, -1))
        values = (grad, rounded.value), (grad, unrounded.value)
        grad_of_dp, value, self._dp = _pair(sites.dp, *values, Alphas(rhs=pv.rhs))
        grad_of_dv, self._dv = _right(sites.dv, grad, grad, 1.0)
        key_of_dq, self._dq = _right(sites.dq, rounded.key, unrounded.key, settings.qk.rhs)
        query_of_dk, self._dk = _right(sites.dk, rounded.query, unrounded.query, settings.qk.lhs)
        self._grad_of_dp = QueryOperand(grad_of_dp, groups, axis=-1)
        self._grad_of_dv = QueryOperand(grad_of_dv, groups, axis=-2)
        self._query_of_dk = QueryOperand(query_of_dk, groups, axis=-2)
        shape = (batch * heads, queries, keys)
        of_ds = [site.lhs_parts(shape, None, grad.device) for site in (sites.dq, sites.dk)]
        if sites.dv.has_type:  # of the probabilities as the softmax returns them
            probs = sites.dv.lhs_parts(shape, 1.0, grad.device)
            settings = replace(settings, scores=replace(settings.scores, normalized=True))
        else:
            probs, self._dv.lhs = settings.probs, pv.lhs
        self._turn_of_dq = None if sites.dq.has_type else turn
        self._turn_of_dk = None if sites.dk.has_type else turn
        self._turn_of_dv = None if sites.dv.has_type else probs.turn
        settings = replace(settings, qk=of_scores)
        parts = [probs, *of_ds]
        watched = any(operand.is_watched for operand in parts[not sites.dv.has_type :])
        row_block = lcm(self._grad_of_dv.row_block, self._query_of_dk.row_block)
        super().__init__((query, key, value), settings, parts, watched, row_block)
        has_own_key = sites.qk_recompute.has_type or sites.dq.has_type
        self._key_of_dq = KeyOperand(key_of_dq, groups, axis=-2) if has_own_key else self.key
        self._of_softmax = torch.empty_like(self._softmax)
        self._of_query = query.tensor.new_empty(queries, batch, heads, features)
        wide = torch.promote_types(grad.dtype, torch.float32)
        rows = probs.padded(shape)[-1] if self._turn_of_dv else keys
        self._of_key, self._of_value = (
            grad.new_zeros(batch * groups, *size, dtype=wide)
            for size in ((keys, query_of_dk.tensor.size(-1)), (rows, grad.size(-1)))
        )
        self.find_amaxes([self._dv, self._dq, self._dk])

    def exact(self, chunk: Chunk) -> Iterator[tuple[OperandParts, Tensor, Tensor]]:
        """Yield for each of `parts` what it quantizes, as the base class does."""
        probs, of_dq, of_dk = self.parts
        probabilities = self.probabilities(chunk, is_rounding=False)
        yield probs, probabilities.exact, self._scores
        scores = self._by_head(self._gradient_of_scores(chunk, probabilities))
        yield of_dq, scores, self._probs
        yield of_dk, scores, self._probs

    def add(self, chunk: Chunk) -> None:
        """Add the gradients of a chunk."""
        probabilities = self.probabilities(chunk)
        if self.settings.backward.dv.has_type:
            self._observe(self.parts[0], chunk, probabilities.exact, probabilities.rounded)
        grad = self._grad_of_dv.take(chunk, probabilities.rounded.size(-2))
        row = probabilities.row
        weighted = grad if row is None else (grad * row).to(grad.dtype)
        self._accumulate(self._of_value, chunk, probabilities.rounded, weighted, self._dv.both)
        # The rounded probabilities are no longer needed.
        scores = self._gradient_of_scores(chunk, probabilities)
        scale = self.settings.scores.scale
        _, of_dq, of_dk = self.parts
        rounded = self._rounded(of_dq, chunk, scores)
        keys = self._key_of_dq.take(chunk, rounded.size(-1))
        of_query = bmm(rounded, keys, self._dq.both).mul_(scale)
        of_query = _undone(self._turn_of_dq, of_query, -1)
        self.put(by_matrix(self._of_query, self.groups), chunk, of_query)
        rounded = self._rounded(of_dk, chunk, scores)
        query = self._query_of_dk.take(chunk, rounded.size(-2) // self.plan.repeats)
        self._accumulate(self._of_key, chunk, rounded, query, self._dk.both, scale)

    def _gradient_of_scores(self, chunk: Chunk, probabilities: _Probabilities) -> Tensor:
        """Return ds by group, in place of the rounded probabilities or of the softmax's gradient.

        Its products are multiplied by the scale of the scores.
        """
        product = self.space(self._scores, chunk)
        grad, values = self._grad_of_dp.take(chunk), self.value.take(chunk)
        bmm(grad, values.transpose(1, 2), self._dp.both, out=self.by_group(chunk, product))
        return self._through_softmax(chunk, product, probabilities.softmax)

    def _rounded(self, parts: OperandParts, chunk: Chunk, scores: Tensor) -> Tensor:
        """Return ds by group, rounded in place of the probabilities, which are not needed."""
        exact = self._by_head(scores)
        out = self.space(self._probs, chunk, parts).flatten(0, 1)
        rounded = parts.quantize(exact, chunk.first * self.plan.repeats, chunk.start, out=out)
        self._observe(parts, chunk, exact, rounded)
        return self.by_group(chunk, rounded)

    def _by_head(self, scores: Tensor) -> Tensor:
        """View scores by group as [heads, queries, keys]."""
        return scores.unflatten(1, (self.plan.repeats, -1)).flatten(0, 1)

    def _observe(self, parts: OperandParts, chunk: Chunk, exact: Tensor, rounded: Tensor) -> None:
        parts.observe(exact, rounded, chunk.first * self.plan.repeats, chunk.start)

    def sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value."""
        key, value = (
            _undone(turn, total, axis)
            .transpose(0, 1)
            .unflatten(1, (-1, self.groups))
            .to(self._of_query.dtype)
            for turn, total, axis in (
                (self._turn_of_dk, self._of_key, -1),
                (self._turn_of_dv, self._of_value, -2),
            )
        )
        return self._of_query, key, value

    def _through_softmax(self, chunk: Chunk, grad: Tensor, softmax: Tensor) -> Tensor:
        """Return the gradient of the scores by group, from the softmax before rounding."""
        wide = self.space(self._input, chunk)
        if wide.dtype != grad.dtype:
            wide.copy_(grad)
        gradient = self.space(self._of_softmax, chunk)
        torch.ops.aten._softmax_backward_data.out(
            wide, softmax, -1, softmax.dtype, grad_input=gradient
        )
        hidden = self.hidden(chunk)
        if hidden is not None:  # a query that sees no key has a softmax over hidden keys
            gradient.masked_fill_(hidden, 0.0)
        if self.settings.scores.factor is not None:
            gradient.mul_(self.settings.scores.factor)
        if gradient.dtype != grad.dtype:
            gradient = grad.copy_(gradient)
        return self.by_group(chunk, gradient)

    def _accumulate(
        self,
        total: Tensor,
        chunk: Chunk,
        scores: Tensor,
        rows: Tensor,
        alpha: float,
        scale: float = 1.0,
    ) -> None:
        """Add scale * alpha * scores^T @ rows to the part of `total` for the chunk's keys."""
        part = total[chunk.first : chunk.last, chunk.low : chunk.low + scores.size(-1)]
        scores, repeats = self.by_group(chunk, scores), self.plan.repeats
        if self.plan.rows == self.plan.queries:
            # Head by head, as upstream does with repeated keys: mostly the same bits.
            scores = scores.unflatten(1, (repeats, -1)).flatten(0, 1)
            rows = rows.unflatten(1, (repeats, -1)).flatten(0, 1)
        product = bmm(scores.transpose(1, 2), rows, alpha)
        if scale != 1.0:
            product.mul_(scale)
        part += product.unflatten(0, (part.size(0), -1)).sum(1)


def _undone(turn: SignedHadamard | None, tensor: Tensor, axis: int) -> Tensor:
    """Return a tensor without its transform, in place."""
    return tensor if turn is None else turn.undo(tensor, axis, out=tensor)


def _pair(
    site: GemmOperands, rounded: tuple[Tensor, ...], unrounded: tuple[Tensor, ...], alphas: Alphas
) -> tuple[Sliced, Sliced, Alphas]:
    """Return both operands of a product, and their alphas: of `rounded` if it has no type."""
    if not site.has_type:
        return Sliced(rounded[0]), Sliced(rounded[1]), alphas
    own = site.separate_alphas()
    return site.sliced("lhs", unrounded[0]), site.sliced("rhs", unrounded[1]), own


def _right(
    site: GemmOperands, rounded: Tensor, unrounded: Tensor, alpha: float
) -> tuple[Sliced, Alphas]:
    """Return the right operand of a product, and its alphas: of `rounded` if it has no type."""
    if not site.has_type:
        return Sliced(rounded), Alphas(rhs=alpha)
    own = site.separate_alphas()
    return site.sliced("rhs", unrounded), own
