"""Run the experts of a rank as one grouped GEMM; each expert quantizes its own operands.

Upstream supports --moe-grouped-gemm only with Transformer Engine. Here the flag keeps upstream's
SequentialMLP with its weights, names and checkpoints. Operands are bit-equal to those of experts
that run one by one; torch's grouped product multiplies all of them at once.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from mqo.megatron import linear
from mqo.quant.gemms import GemmOperands, gemm_operands, operands_of
from mqo.quant.packed_activations import saved_operands
from mqo.quant.products import Alphas, matmul

# CUDA's grouped product needs a summed axis of rows in multiples of 16 bytes.
ROWS = 8


def experts_class(grouped: bool, one_by_one: Any) -> type[Module]:
    """Return the class of a rank's experts; the patched upstream calls it.

    `one_by_one` is upstream's SequentialMLP.
    """
    return _grouped_class(one_by_one) if grouped else one_by_one


@functools.cache
def _grouped_class(one_by_one: Any) -> type[Module]:
    class GroupedExperts(one_by_one):
        """Upstream's SequentialMLP, with a forward pass that computes all experts at once."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            check(self.config)

        def forward(
            self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor
        ) -> tuple[Tensor, Tensor | None]:
            """Return [tokens, h] for [tokens, h], sorted by expert, and None for the bias."""
            experts = list(self.local_experts)
            parts = [part for expert in experts for part in (expert.linear_fc1, expert.linear_fc2)]
            # Upstream's GEMM of a frozen weight has no sites, so experts run one by one.
            if len(experts) == 1 or not all(part.weight.requires_grad for part in parts):
                return super().forward(hidden, tokens_per_expert, probs)
            # Upstream's own pass, with one expert that represents all of them.
            whole = _as_one(experts, tokens_per_expert.tolist())
            alone = SimpleNamespace(config=self.config, num_local_experts=1, local_experts=[whole])
            return one_by_one.forward(alone, hidden, tokens_per_expert, probs)

    return GroupedExperts


def check(config: Any) -> None:
    """Raise ValueError if grouped experts do not support upstream's configuration."""
    if not hasattr(torch.nn.functional, "grouped_mm"):
        raise ValueError(
            f"torch {torch.__version__} has no grouped product. Expected: torch 2.10 or newer, or "
            "no --moe-grouped-gemm"
        )
    recomputed = config.recompute_modules or () if config.recompute_granularity else ()
    if config.add_bias_linear:
        raise ValueError(
            "Grouped experts do not support a bias. Expected: --disable-bias-linear, or no "
            "--moe-grouped-gemm"
        )
    if "moe_act" in recomputed:
        raise ValueError(
            "Grouped experts do not support --recompute-modules moe_act. Expected: "
            "--recompute-modules without moe_act, or no --moe-grouped-gemm"
        )


def _as_one(experts: list[Any], counts: list[int]) -> Any:
    """Return the forward pass of an expert that contains the linear layers of all experts."""
    first = experts[0]
    whole = SimpleNamespace(
        config=first.config,
        activation_func=first.activation_func,
        linear_fc1=_Linear([expert.linear_fc1 for expert in experts], counts),
        linear_fc2=_Linear([expert.linear_fc2 for expert in experts], counts),
    )
    return functools.partial(type(first).forward, whole)


class _Linear(Module):
    """The linear layers of all experts: [tokens, in] to [tokens, out], without a bias."""

    def __init__(self, layers: list[Module], counts: list[int]) -> None:
        super().__init__()
        self._layers, self._counts = (
            tuple(layers),
            counts,
        )  # a tuple, so that they are not submodules here

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:
        weights = [layer.weight for layer in self._layers]
        return _GroupedGemm.apply(tokens, self._counts, *weights), None


@dataclass
class _Saved:
    """Store what the forward pass of an expert saves, instead of autograd's context."""

    saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, counts: list[int], *weights: Parameter) -> Tensor:
        operands, alphas = _operands("fprop", weights)
        inputs, saved = tokens.split(counts), [_Saved() for _ in weights]
        for store, gemm, x, weight in zip(saved, operands, inputs, weights, strict=True):
            store.save_for_backward(x, weight)
            gemm.save(store, x, weight, x)
        ctx.counts, ctx.weights, ctx.saved = counts, weights, saved
        ctx.sizes = [len(store.saved_tensors) for store in saved]
        ctx.save_for_backward(*(tensor for store in saved for tensor in store.saved_tensors))
        for store in saved:  # autograd keeps and frees them
            store.saved_tensors = ()
        lhs = _as_one_tensor(
            [gemm.lhs(x) for gemm, x in zip(operands, inputs, strict=True)], tokens
        )
        rhs = [gemm.rhs(weight) for gemm, weight in zip(operands, weights, strict=True)]
        return _product(lhs, torch.stack(rhs).transpose(1, 2), counts, alphas)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, pairs = iter(ctx.saved_tensors), []
        for store, size in zip(ctx.saved, ctx.sizes, strict=True):
            store.saved_tensors = tuple(next(tensors) for _ in range(size))
            pairs.append(saved_operands(store))
            store.saved_tensors = ()
        grads = grad.split(ctx.counts)

        operands, alphas = _operands("dgrad", ctx.weights)
        lhs = _as_one_tensor([gemm.lhs(g) for gemm, g in zip(operands, grads, strict=True)], grad)
        rhs = [gemm.rhs(weight) for gemm, (_, weight) in zip(operands, pairs, strict=True)]
        of_tokens = _product(lhs, torch.stack(rhs), ctx.counts, alphas)
        of_tokens = _estimated(of_tokens, ctx.counts, ctx.weights, [x for x, _ in pairs])

        operands, alphas = _operands("wgrad", ctx.weights)
        left = [_padded(gemm.lhs(g)) for gemm, g in zip(operands, grads, strict=True)]
        right = [_padded(gemm.rhs(x)) for gemm, (x, _) in zip(operands, pairs, strict=True)]
        counts = [len(part) for part in left]
        of_weights = _product(_as_one_tensor(left, grad).t(), torch.cat(right), counts, alphas)
        return of_tokens, None, *of_weights.unbind()


def _operands(site: str, weights: Sequence[Parameter]) -> tuple[list[GemmOperands], list[Alphas]]:
    """Return the quantizers of each expert's operands, and the alphas that they exclude."""
    quant_type = linear.source_types()[site]
    operands = [gemm_operands(site, quant_type, weight) for weight in weights]
    return operands, [gemm.separate_alphas() for gemm in operands]


def _estimated(
    grads: Tensor, counts: list[int], weights: Sequence[Parameter], inputs: list[Tensor]
) -> Tensor:
    """Return the gradients of inputs as custom quantizers compute them: experts have no hooks."""
    quant_type = linear.source_types()["fprop"]
    operands = [operands_of("fprop", quant_type, weight) for weight in weights]
    if not any(gemm.has_estimator("lhs") for gemm in operands):
        return grads
    parts = zip(operands, grads.split(counts), inputs, strict=True)
    return torch.cat([gemm.estimated("lhs", grad, x) for gemm, grad, x in parts])


def _as_one_tensor(parts: list[Tensor], whole: Tensor) -> Tensor:
    """Return the parts as one tensor: `whole` itself if they are views of it."""
    return whole if all(part._base is whole for part in parts) else torch.cat(parts)


def _padded(rows: Tensor) -> Tensor:
    """Pad rows with zeros to a multiple of ROWS."""
    missing = -len(rows) % ROWS
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def _product(left: Tensor, right: Tensor, counts: list[int], alphas: list[Alphas]) -> Tensor:
    """Multiply group by group; `counts` are rows of `left`, or elements of the summed axis.

    torch's grouped product has no alpha: with alphas, groups are multiplied one by one.
    """
    if all(alpha == Alphas() for alpha in alphas):
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return torch.nn.functional.grouped_mm(left, right, offs=ends.to(left.device))
    factors = [alpha.both for alpha in alphas]
    if right.dim() == 3:
        parts = zip(left.split(counts), right, factors, strict=True)
        return torch.cat([matmul(*part) for part in parts])
    parts = zip(left.split(counts, dim=1), right.split(counts), factors, strict=True)
    return torch.stack([matmul(*part) for part in parts])
