"""UE5M3 (arXiv 2609.02846): FP4 with block scales of a wide range, and an amax of every 50th step.

The E4M3 scales of NVFP4 have a sign bit, which they do not need. UE5M3 (arXiv 2509.17791,
2601.19026) has a fifth exponent bit instead, with bias 15: its values are 2^-17 to 61,440, those of
E4M3 2^-9 to 448. So the scale of the tensor need not follow its amax. It maps an amax that is
sampled in steps 1, 51, 101, ... to 448. Until the next sample, the tensor may grow 137-fold.

The formats, 448, rounding to nearest even and the order of float32 operations are those of the
reference in PyTorch, github.com/MrHuff/ue5m3-fp4. Differences:

- Here the scale of the tensor multiplies the product of the GEMM, as in the paper's experiments.
- The reference samples in the first micro-batch, over all ranks. Here the state is constant within
  a step: in a step with a sample, each micro-batch uses its own amax, and later steps the largest.
- The reference samples again after a restart. Here checkpoints contain the samples.
- The reference keeps a sample of zero, and refuses Inf. Here the next step then samples again:
  an expert may get no tokens, and loss scaling may cause Inf.
- Stochastic rounding draws 24 bits, as in all formats here; the reference draws 8.
- With another target than 448, the factor of the tensor may differ in the last bit of a float32.

61,440 leaves the largest exponent unused. If only the code 0xFF is NaN, as in CUDA 13.4, the
largest scale is 114,688. The difference matters only after more than 137-fold growth.
"""

from collections.abc import Mapping

import torch
from mqo.quant import QuantizerContext, end_step, quantizer, round_term
from torch import Tensor


@quantizer(
    "ue5m3",
    block=16,
    square=True,
    needs_amax=True,
    options={"every": 50, "target": 448.0},
    state={"amax": 0.0, "step": 0.0},
)
def nearest(x: Tensor, context: QuantizerContext) -> tuple[Tensor, float]:
    """Round elements to nearest, for activations and weights.

    Options:
        every: steps from a sample of the amax to the next one; with 1 each tensor uses its own.
        target: the block scale of the sampled amax. A larger one leaves less room to grow, and
            keeps smaller blocks from a scale of 0.

    The state is the sampled amax and its step. Step 0 is none yet: the tensor uses its own amax.
    """
    return _rounded(x, context, "nearest-even")


@quantizer(
    "ue5m3_stochastic",
    block=16,
    square=True,
    needs_amax=True,
    stochastic=True,
    options={"every": 50, "target": 448.0},
    state={"amax": 0.0, "step": 0.0},
)
def stochastic(x: Tensor, context: QuantizerContext) -> tuple[Tensor, float]:
    """Round elements stochastically, for gradients. Options and state are those of `nearest`."""
    return _rounded(x, context, "stochastic")


def _rounded(x: Tensor, context: QuantizerContext, rounding: str) -> tuple[Tensor, float]:
    """Return the elements times their block scales, and the scale of the tensor."""
    now, state = context.step + 1, context.state
    is_due = (state["step"] == 0) | (now - state["step"] >= context.options["every"])
    amax = torch.where(is_due, context.amax, state["amax"])
    context.note("amax", amax)
    context.note("step", torch.where(is_due, float(now), state["step"]))
    # The format takes its amax to the block scale 448.
    amax = amax * (448.0 / context.options["target"])
    return round_term(x, "nvfp4_ue5m3", context, amax=amax, tile=context.tile, rounding=rounding)


@end_step("ue5m3_stochastic")
@end_step("ue5m3")
def sampled(
    state: dict[str, Tensor],
    notes: dict[str, Tensor],
    step: int,
    options: Mapping[str, object],
) -> dict[str, Tensor]:
    """Keep the amax that the step used, the largest over its micro-batches and all ranks."""
    return notes if 0 < notes["amax"] < torch.inf else state
