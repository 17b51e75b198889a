"""Quantize the two operands of each GEMM; patched Megatron calls this module.

    site          product                   sums over
    fprop         y = x weight^T            input features
    dgrad         dx = grad weight          output features
    wgrad         dweight = grad^T x        tokens
    qk            scores = query key^T      features of a head
    pv            context = probs value     keys
    qk_recompute  scores = query key^T      features of a head
    dv            dvalue = probs^T grad     queries
    dp            dprobs = grad value^T     features of a head
    dq            dquery = ds key           keys
    dk            dkey = ds^T query         queries

The last five are those of attention's backward pass; ds is the gradient of the scores.

Blocks and scales run along the axis that a product sums over, which `[sites]` in formats.toml lists
for each operand. patches/quant_sites.py inserts the calls into Megatron's source, as in

    operands = gemm_operands("fprop", custom_quant_type, weight)
    output = operands.product(torch.matmul)(operands.lhs(x), operands.rhs(weight).t())

The call of `product` comes before those of `lhs` and `rhs`, which therefore exclude the scale of
the tensor; products.py applies it. Without that call, as for Transformer Engine, operands include
it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from mqo.quant import head_tiles
from mqo.quant.backend import fake_quantize, is_fake
from mqo.quant.finite import check_rounding
from mqo.quant.formats import ATTENTION, NONE, SITES, GemmSite, check_choice, check_type
from mqo.quant.gradient_noise import WatchedOperand, sample_gradient
from mqo.quant.hadamard import SignedHadamard
from mqo.quant.labels import LABEL, SHARDS, UNLABELED, is_exempt
from mqo.quant.operand_table import FPROP, WGRAD
from mqo.quant.packed_activations import save_packed
from mqo.quant.parts import OperandParts
from mqo.quant.plugin_calls import call
from mqo.quant.plugin_context import CallSite, QuantizerError
from mqo.quant.plugin_gradients import estimated
from mqo.quant.plugin_states import Operand
from mqo.quant.products import Alphas, is_known, joins_terms, with_alphas
from mqo.quant.quant_config import QuantConfig
from mqo.quant.quantization import PROCESS, Quantization
from mqo.quant.rounded import Rounded
from mqo.quant.scales import alpha_of
from mqo.quant.slices import Sliced, SliceRounding
from mqo.quant.spec import Hadamard, OperandSpec, QuantSpec, without_alpha
from mqo.quant.stochastic import derive_seed
from mqo.quant.straight_through import straight_through
from mqo.quant.tensor_amax import Shards, is_shard, largest, shard_rank, shared_amax
from mqo.quant.weights import cached

# The first sites of a layer's forward pass.
_FIRST = ("fprop", "qk")
# The operands that the unfused path of attention repeats for the query heads of a group.
_GROUPED = ("key", "value")


class GemmOperands:
    """The operands of a GEMM; in this base class they are not quantized, and are not changed."""

    __slots__ = ("quantization",)
    has_type: ClassVar[bool] = False

    def __init__(self, quantization: Quantization = PROCESS) -> None:
        self.quantization = quantization

    def product(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, or one that computes the same product of `lhs` and `rhs` with alphas.

        Call it before `lhs` and `rhs`.
        """
        return function

    def separate_alphas(self) -> Alphas:
        """Exclude alphas from the operands from now on; `lhs` and `rhs` set the returned ones."""
        return Alphas()

    def lhs(self, tensor: Tensor) -> Tensor:
        """Return the left operand for the GEMM."""
        return tensor

    def rhs(self, tensor: Tensor) -> Tensor:
        """Return the right operand for the GEMM."""
        return tensor

    def sliced(self, side: str, tensor: Tensor) -> Sliced:
        """Return an operand, "lhs" or "rhs", to be quantized in slices along any axes.

        One whose bits depend on more than its blocks and its amax is quantized now. Call
        `separate_alphas` before.
        """
        return Sliced(tensor)

    def lhs_parts(
        self, shape: tuple[int, int, int], amax: float | None, device: torch.device
    ) -> OperandParts:
        """Return a quantizer that takes the left operand in parts.

        `shape` and `amax` are those of the whole operand. If its amax is not known, the caller
        gives the quantizer that of the transformed operand, and the quantizer's alpha to alphas.
        """
        return OperandParts(self.quantization, ("", "", ""), QuantSpec(NONE), shape)

    def turn(self, size: int) -> SignedHadamard | None:
        """Return the transform of both operands, along `size` elements; None if they have none."""
        return None

    def has_estimator(self, side: str) -> bool:
        """Return whether the quantizer of an operand, "lhs" or "rhs", computes its gradient."""
        return False

    def estimated(self, side: str, grad: Tensor, original: Tensor) -> Tensor:
        """Return the gradient of an operand, "lhs" or "rhs", from that of the rounded operand."""
        return grad

    def save(self, ctx: object, activation: Tensor, weight: Tensor, gathered: Tensor) -> None:
        """Store in a linear layer's `ctx` what its backward pass needs: the micro-batch."""
        self.quantization.micro_batches.keep(ctx)


@dataclass(slots=True)
class QuantizedOperands(GemmOperands):
    """Quantizes and records the operands of one layer's GEMM.

    `quant_type` is the type of the site. Transformed operands are padded to a multiple of the
    transform's size. `repeats` is the number of query heads that share a key and a value. Gradients
    use the straight-through estimator, also for elements that saturate. `alphas` are the factors
    that the operands exclude; None if they include them. With `joins_terms`, the terms of a sum are
    joined along the contraction axis; otherwise they are added. `watched` has the operands of a
    wgrad whose noise is measured, until both are known.
    """

    has_type: ClassVar[bool] = True

    quantization: Quantization
    site: GemmSite
    quant_type: str
    layer: str
    shards: Shards | None = None
    repeats: int = 1
    alphas: Alphas | None = None
    joins_terms: bool = False
    watched: dict[str, WatchedOperand] = field(default_factory=dict)

    @property
    def options(self) -> QuantConfig:
        """The options of the model."""
        return self.quantization.options

    def product(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that computes the product of `lhs` and `rhs`, as the base class does.

        For a function that products.py does not know, `lhs` and `rhs` include alpha.
        """
        if not is_known(function):
            return function
        self.joins_terms = joins_terms(function)
        return with_alphas(function, self.separate_alphas())

    def separate_alphas(self) -> Alphas:
        """Exclude alphas from the operands, as the base class does."""
        self.alphas = Alphas()
        return self.alphas

    def lhs(self, tensor: Tensor) -> Tensor:
        """Return the left operand, quantized along the site's contraction axis."""
        return self._straight_through(tensor, "lhs")

    def rhs(self, tensor: Tensor) -> Tensor:
        """Return the right operand, quantized along the site's contraction axis."""
        return self._straight_through(tensor, "rhs")

    def sliced(self, side: str, tensor: Tensor) -> Sliced:
        """Return an operand to be quantized in slices, as the base class does."""
        operand, axis = self.site.operand(side)
        operand_spec = self._operand_spec(operand)
        spec = operand_spec.spec
        turn = self._turn(operand_spec, tensor.shape[axis])
        points = turn.hadamard.points if turn else 1
        if not operand_spec.rounds_by_block:
            return Sliced(self._straight_through(tensor, side), points=points)
        amax = None
        if spec.scales_by_tensor:
            whole = turn.apply(tensor, axis) if turn else tensor
            amax = self._amax(whole, operand, spec)
            amax = largest(whole) if amax is None else amax
        alpha = None
        if self.alphas:
            alpha = _alpha(amax, without_alpha(spec))
            setattr(self.alphas, side, alpha)
        rounding = SliceRounding(self.quantization, self._key(operand), spec, amax, alpha, turn)
        return Sliced(tensor, rounding, points)

    def lhs_parts(
        self, shape: tuple[int, int, int], amax: float | None, device: torch.device
    ) -> OperandParts:
        """Return a quantizer that takes the left operand in parts, as the base class does."""
        operand, axis = self.site.lhs, self.site.lhs_axis
        spec = self._operand_spec(operand).spec
        if spec.plugin:
            raise ValueError(
                f"{self.layer} computes attention in chunks, and {spec.quant_type} is a quantizer "
                "in Python. Expected: --attention-backend unfused, or another type for "
                f"{self.site.name}"
            )
        key, seed, turn = self._key(operand), self._seed(operand, spec), self.turn(shape[axis])
        alpha = 1.0 if self.alphas else None
        parts = OperandParts(self.quantization, key, spec, shape, seed, None, alpha, axis, turn)
        if amax is not None and turn is None and spec.scales_by_tensor:
            parts = parts.with_amax(torch.full((), amax, dtype=torch.float32, device=device))
        if self.alphas and parts.alpha is not None:
            self.alphas.lhs = parts.alpha
        return parts

    def turn(self, size: int) -> SignedHadamard | None:
        """Return the transform of both operands, as the base class does."""
        return self._turn(self._operand_spec(self.site.lhs), size)

    def _turn(self, operand_spec: OperandSpec, size: int) -> SignedHadamard | None:
        hadamard = operand_spec.hadamard
        return SignedHadamard(hadamard, self._sign_seed(hadamard), size) if hadamard else None

    def save(self, ctx: object, activation: Tensor, weight: Tensor, gathered: Tensor) -> None:
        """Store the micro-batch in `ctx`, and replace the activation by codes if it is packed.

        It is packed if the option `save_activations` is "packed". `activation` belongs to this
        rank: under sequence parallelism it is a part of the left operand, `gathered`.
        """
        self.quantization.micro_batches.keep(ctx)
        if self.options.save_activations == "packed":
            operand, axis = self.site.lhs, self.site.lhs_axis
            spec = self._operand_spec(operand).spec
            amax = self._amax(gathered, operand, spec)
            if amax is None and spec.needs_tensor_amax:
                amax = largest(gathered)
            seed = self._seed(operand, spec, part=_part(activation, gathered, self.shards))
            save_packed(ctx, activation, weight, spec, axis, seed, amax)

    def has_estimator(self, side: str) -> bool:
        """Return whether the quantizer of an operand computes its gradient."""
        plugin = self._operand_spec(getattr(self.site, side)).spec.plugin
        return plugin is not None and plugin.estimator

    def estimated(self, side: str, grad: Tensor, original: Tensor) -> Tensor:
        """Return the gradient of an operand, from that of the rounded operand."""
        if not self.has_estimator(side):
            return grad
        operand, axis = self.site.operand(side)
        operand_spec = self._operand_spec(operand)
        turn, of_rounded, x = self._turn(operand_spec, grad.shape[axis]), grad, original
        if turn:
            of_rounded = turn.apply(grad.float(), axis)
            x = turn.apply(original, axis)  # as it was rounded
        result = estimated(of_rounded, x, operand_spec.spec, axis, self._call_site(operand))
        return turn.undo(result, axis).to(grad.dtype) if turn else result

    def _straight_through(self, tensor: Tensor, side: str) -> Tensor:
        operand = getattr(self.site, side)
        operand_spec = self._operand_spec(operand)
        spec = operand_spec.spec
        if operand == "probs" and self.options.unnormalized_probs and spec.quant_type != NONE:
            raise ValueError(
                f"{self.layer} computes all s x s scores, with normalized probabilities. Expected: "
                "attention in chunks, which --unnormalized-probs needs: use `--attention-backend "
                "auto`, without dropout, sliding window and softmax offset"
            )
        if not operand_spec.changes:
            self._watch_gradient(side, tensor, Rounded(tensor))
            return tensor
        quantize, undo = partial(self._quantize, side, operand_spec), None
        axis = self.site.operand(side)[1]
        if turn := self._turn(operand_spec, tensor.shape[axis]):
            undo = partial(turn.undo, axis=axis)
        if spec.rounding == "stochastic" and operand in _GROUPED and tensor.dim() == 3:
            quantize = partial(_once_a_group, self.repeats, quantize)
        return straight_through(tensor, quantize, undo)

    def _quantize(self, side: str, operand_spec: OperandSpec, original: Tensor) -> Tensor:
        """Return one operand, quantized; set its alpha if operands exclude alphas."""
        operand, axis = self.site.operand(side)
        key = self._key(operand)
        if operand_spec.is_only_source:
            rounded = self._in_fprop(operand, original, key)
        else:
            rounded = self._rounded(side, operand_spec, original, key)
        self._watch_gradient(side, original, rounded)
        if self.alphas is None or (rounded.rest and not self.joins_terms):
            return rounded.value().to(original.dtype)
        setattr(self.alphas, side, rounded.alpha)
        setattr(self.alphas, f"{side}_rest", tuple(term.alpha for term in rounded.rest))
        tensors = [term.tensor.to(original.dtype) for term in rounded.terms]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=axis)

    def _watch_gradient(self, side: str, original: Tensor, rounded: Rounded) -> None:
        """Measure the noise of wgrad's product, if this step does, when both operands are known."""
        recorder = self.quantization.recorder
        if self.site.name == WGRAD and recorder.has_gradients:
            self.watched[side] = WatchedOperand(original, rounded.value())
            if len(self.watched) == 2:
                sample = sample_gradient(self.watched.pop("lhs"), self.watched.pop("rhs"))
                recorder.observe_gradient(self.layer, self.quant_type, sample)

    def _rounded(
        self, side: str, operand_spec: OperandSpec, original: Tensor, recorded: Operand | None
    ) -> Rounded:
        """Return one operand, quantized, without its gain; record it as `recorded`."""
        operand, axis = self.site.operand(side)
        spec = operand_spec.spec
        if fault := operand_spec.size_fault(size := original.shape[axis]):
            raise QuantizerError(
                f"{operand} of {self.site.name}, layer {self.layer} has {size} elements per row, "
                f"and {fault}"
            )
        keeps = isinstance(original, Parameter) and self.options.cache_weights
        seed = self._seed(operand, spec, keeps)
        excluding = without_alpha(spec) if self.alphas else spec
        in_head_tiles = self.site.layer == ATTENTION and spec.tile == "square"

        @functools.cache
        def prepared() -> tuple[Tensor, Tensor | None]:
            source = original
            if operand_spec.source:
                named = None if operand_spec.is_quantized else recorded
                source = self._in_fprop(operand, original, named).value()
            return self._prepared(operand, operand_spec, axis, source)

        def make(out: Tensor | None = None) -> Rounded:
            x, own_amax = prepared()
            if operand_spec.source:
                out = None
            elif not operand_spec.is_plain:  # `x` is new: overwrite it unless it is measured
                out = None if self.quantization.recorder.measuring else x
            amax = self._amax(x, operand, spec)
            amax = own_amax if amax is None else amax
            if spec.plugin:
                own = call(x, spec, axis, seed, amax, self._call_site(operand))
                whole = self.alphas is not None or own.rest
                return own if whole else Rounded(own.value().to(x.dtype), own.amax)
            if amax is None and excluding.without_alpha:
                amax = largest(x)
            if in_head_tiles:
                rounded = head_tiles.quantize_operand(x, excluding, operand, seed, amax)
            else:
                rounded = fake_quantize(x, excluding, axis=axis, out=out, seed=seed, amax=amax)
            return Rounded(rounded, amax, _alpha(amax, excluding))

        if keeps:
            seeds = (seed, self._sign_seed(operand_spec.hadamard))
            rounded = cached(original, replace(operand_spec, spec=excluding), axis, seeds, make)
        else:
            rounded = make()
        if self.options.check_nan:
            check_rounding(*self._key(operand), spec.quant_type, original, rounded.value())
        if operand_spec.is_quantized and recorded:
            recorder = self.quantization.recorder
            measured, quantized = (prepared()[0] if recorder.measuring else original), rounded
            if in_head_tiles and recorder.measuring:
                tiles = partial(head_tiles.tiles_of, spec=spec, operand=operand)
                measured, quantized = tiles(measured), rounded.map(tiles)
            along = -1 if in_head_tiles else axis
            recorder.observe(*recorded, spec, along, measured, quantized, dump=original)
        return rounded.divided(operand_spec.gain)

    def _in_fprop(self, operand: str, original: Tensor, recorded: Operand | None) -> Rounded:
        """Return the values to which fprop rounded an operand of backward, as it rounds it again.

        They have no transform any more. `recorded` is the name for the records, None for none.
        """
        options, site = self.options, SITES[FPROP]
        quant_type = self.quantization.scheduled(FPROP, options.asked.get(FPROP, NONE))
        if quant_type == NONE or options.is_excluded(FPROP, self.layer):
            return Rounded(original)
        alphas = Alphas() if self.alphas else None
        fprop = replace(self, site=site, quant_type=quant_type, alphas=alphas)
        operand_spec = fprop._operand_spec(operand)
        if not operand_spec.changes:
            return Rounded(original)
        if operand == site.lhs and options.save_activations == "packed":  # it was saved so
            if recorded:
                self.quantization.recorder.count(*recorded, operand_spec.spec.quant_type)
            return Rounded(original)
        side = "lhs" if operand == site.lhs else "rhs"
        rounded = fprop._rounded(side, operand_spec, original, recorded)
        axis = site.operand(side)[1]
        turn = fprop._turn(operand_spec, original.shape[axis])
        return rounded.map(lambda tensor: turn.undo(tensor.float(), axis)) if turn else rounded

    def _call_site(self, operand: str) -> CallSite:
        """Return what a custom quantizer may know of an operand."""
        model, key = self.quantization, self._key(operand)
        share = partial(shared_amax, operand=operand, shards=self.shards)
        seed = self._shared_seed("both")
        return CallSite(key, model.progress.step, model.states, share, seed)

    def _key(self, operand: str) -> Operand:
        return self.site.name, self.layer, operand

    def _operand_spec(self, operand: str) -> OperandSpec:
        return self.options.operand_spec(self.site.name, operand, self.layer, self.quant_type)

    def _prepared(
        self, operand: str, operand_spec: OperandSpec, axis: int, original: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tensor to round, and its amax if known.

        With a gain (a factor before rounding) or smoothing it is float32, because the dtype of
        `original` may not represent the result.
        """
        x, amax = original, None
        if operand_spec.smooth:
            wide = original.float()
            x = wide - wide.mean(dim=0, keepdim=True)
        if turn := self._turn(operand_spec, x.shape[axis]):
            whole = not is_shard(operand, self.shards)  # for a shard, `_amax` is a collective
            if whole and operand_spec.gain == 1.0 and operand_spec.spec.needs_tensor_amax:
                amax = torch.empty((), dtype=torch.float32, device=x.device)
            x = turn.apply(x, axis, amax=amax)
        return (x, amax) if operand_spec.gain == 1.0 else (x.float() * operand_spec.gain, None)

    def _amax(self, tensor: Tensor, operand: str, spec: QuantSpec) -> Tensor | None:
        """Return the amax for `fake_quantize`; a collective if ranks hold shards."""
        if not spec.needs_tensor_amax:
            return None
        return shared_amax(tensor, operand, self.shards)

    def _seed(
        self, operand: str, spec: QuantSpec, keeps: bool = False, part: int = 0
    ) -> int | None:
        """Return the operand's seed for stochastic rounding, or None.

        If the weight cache keeps the result for a step, all micro-batches share one seed. `part` is
        the number of this rank's part of an operand that the layer gathers.
        """
        if spec.rounding != "stochastic":
            return None
        micro_batch = 0 if keeps else self.quantization.micro_batches.now()
        shard = part or shard_rank(operand, self.shards)
        return self._seed_of(operand, micro_batch, shard)

    def _sign_seed(self, hadamard: Hadamard | None) -> int | None:
        """Return the seed of the signs, None if they are not random."""
        if hadamard is None or hadamard.signs != "random":
            return None
        return self._shared_seed("signs", self.site.computed_again)

    def _shared_seed(self, name: str, site: str = "") -> int:
        """Return a seed that both operands of the GEMM have, on all tensor-parallel ranks."""
        micro_batch = 0 if self.options.cache_weights else self.quantization.micro_batches.now()
        return self._seed_of(name, micro_batch, shard=0, site=site)

    def _seed_of(self, operand: str, micro_batch: int, shard: int, site: str = "") -> int:
        return derive_seed(
            self.options.seed,
            step=self.quantization.progress.step,
            micro_batch=micro_batch,
            shard=shard,
            site=site or self.site.name,
            operand=operand,
            layer=self.layer,
        )


def _alpha(amax: Tensor | None, spec: QuantSpec) -> float:
    """Return the alpha that `spec` excludes, 1 if none; wait for the device."""
    if amax is None or not spec.without_alpha or is_fake(amax):
        return 1.0
    return alpha_of(amax.item(), spec)


def _once_a_group(repeats: int, quantize: Callable[[Tensor], Tensor], heads: Tensor) -> Tensor:
    """Quantize each key or value of [tokens, heads, dim] once, not for each of `repeats` heads.

    The random draws then equal those of the fused path, which does not repeat heads.
    """
    return quantize(heads[:, ::repeats]).repeat_interleave(repeats, dim=1)


def gemm_operands(site: str, quant_type: str, owner: object) -> GemmOperands:
    """Return the quantizer of the operands of `owner`'s GEMM at `site`, for patched Megatron.

    Args:
        site: a name in SITES, which gives the axes along which the operands are quantized.
        quant_type: one of QUANT_TYPES. With 'none', both operands pass through unchanged. The run's
            schedule may set another type for this step, and its `[[rules]]` another type for this
            layer.
        owner: the weight Parameter (linear sites) or the attention module (qk, pv). It has the
            labels that `label_layers` sets; a view of it has none. If the layer is exempt (such as
            a teacher) or excluded by the run, both operands pass through unchanged.

    Raises:
        ValueError: the site or the type is unknown; the text names the valid ones.
    """
    if site in _FIRST and PROCESS.options.is_random:
        PROCESS.micro_batches.begin(getattr(owner, LABEL, UNLABELED))
    return operands_of(site, quant_type, owner)


def model_operands(site: str, owner: object, quantization: Quantization) -> GemmOperands:
    """Return the operands of a GEMM whose type is in the options, not in its source."""
    quant_type = quantization.options.asked.get(site, NONE)
    return operands_of(site, quant_type, owner, quantization)


def operands_of(
    site: str, quant_type: str, owner: object, quantization: Quantization = PROCESS
) -> GemmOperands:
    """Return the same as `gemm_operands`, for callers that count forward passes themselves.

    `quantization` is that of the model; the default is that of the process.
    """
    check_choice("GEMM site", site, tuple(SITES))
    check_type(quant_type)
    layer = getattr(owner, LABEL, UNLABELED)
    quant_type = quantization.scheduled(site, quant_type)
    if quant_type == NONE or is_exempt(owner):
        return GemmOperands(quantization)
    if quantization.options.is_excluded(site, layer):
        quantization.recorder.record_excluded(site, layer)
        return GemmOperands(quantization)
    shards = getattr(owner, SHARDS, None)
    return QuantizedOperands(quantization, SITES[site], quant_type, layer, shards, _repeats(owner))


def _part(activation: Tensor, gathered: Tensor, shards: Shards | None) -> int:
    """Return the number of this rank's part of `gathered`; 0 if it has all of it."""
    return shards.group.rank() if shards and activation is not gathered else 0


def _repeats(attention: object) -> int:
    heads = getattr(attention, "num_attention_heads_per_partition", 1)
    return heads // getattr(attention, "num_query_groups_per_partition", heads)
