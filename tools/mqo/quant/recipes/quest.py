"""QuEST (arXiv 2502.05003): uniform grids that fit a Gaussian, and gradients where they fit.

The recipe quest.toml transforms x and weight with a Hadamard matrix, which makes the elements of a
row about Gaussian. This quantizer then rounds a row to 2^bits values at equal distances, without
zero. The outermost ones are ±clip · RMS; the clip has the smallest squared error for N(0, 1). The
gradient of an element passes if its error is at most half a step ("trust"), that is up to half a
step beyond the outermost value. It is 0 for the elements that are further away.

Formulas and numbers are those of the authors' code, github.com/IST-DASLab/QuEST: for 2 to 8 bits of
HalfHadamardTrustQuantizer in src/models/quantization/base_linear.py. Differences:

- The authors add 1e-8 to clip · RMS. Here a row of zeros remains zeros, and its gradients pass.
- They compare errors with half a step. An element in the middle between two values may then fail,
  by rounding and the 1e-8. Here elements are compared with the ends of the range, so it passes.
- They need a K that is a multiple of 128. So does quest.toml: other sizes are refused.
- With tensor-parallel ranks that divide K, the RMS is that of a rank's part of the row.
"""

import torch
from mqo.quant import QuantizerContext, estimator, quantizer
from torch import Tensor

# {bits: clip}, as OPTIMAL_GAUSSIAN_SCALES in base_linear.py has them. Of 6 to 8 bits they are a bit
# smaller than the best ones, for a squared error that is at most 0.16 % larger.
CLIPS = {
    1: 0.7978845587140913,
    2: 1.4935346200015913,
    3: 2.051068354131873,
    4: 2.513930578568423,
    5: 2.9160938834961225,
    6: 3.276597282593217,
    7: 3.6010497188221655,
    8: 3.884938678807525,
}


@quantizer(
    "quest",
    independent_rows=True,
    options={"bits": 4, "trust": 1.0},
    estimator=True,
    idempotent=False,  # rounded rows have another RMS
)
def quest(x: Tensor, context: QuantizerContext) -> Tensor:
    """Round to the nearest value of each row's grid.

    Options:
        bits: 1 to 8.
        trust: half steps beyond the outermost value up to which gradients pass. In the 1-bit runs
            of the authors, gradients pass up to 1.3 · clip · RMS: 0.3.
    """
    step, positive = _grid(x, context)
    upper = (x / step + 0.5).round().clamp(1 - positive, positive)
    # A step of 0, of a row of zeros, would make it NaN. NaN and Inf in x may.
    return torch.where(step == 0, 0.0, (upper - 0.5) * step)


@estimator("quest")
def trusted(grad: Tensor, x: Tensor, context: QuantizerContext) -> Tensor:
    """Return the gradients of the elements that the grid reaches, and 0 for the others."""
    step, positive = _grid(x, context)
    reach: Tensor = (positive - 0.5 + 0.5 * context.options["trust"]) * step
    return grad * (x.abs() <= reach)


def _grid(x: Tensor, context: QuantizerContext) -> tuple[Tensor, int]:
    """Return the step of each row, and how many values are positive: as many as are negative."""
    bits = context.options["bits"]
    if bits not in CLIPS:
        raise ValueError(f"bits = {bits}; valid: {min(CLIPS)} to {max(CLIPS)}")
    # In float64, because squares may exceed float32, and the order of a sum would matter.
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float64)
    rms = norm / x.shape[1] ** 0.5
    return (rms * (2 * CLIPS[bits] / (2**bits - 1))).float(), 2 ** (bits - 1)
