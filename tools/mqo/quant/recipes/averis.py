"""Averis (arXiv 2603.10444): the mean over tokens apart from the rest, both in NVFP4.

Features of activations and of gradients have means over tokens that are larger than the differences
between tokens. A block's scale then follows the means, and the differences are rounded coarsely. So
an operand X is the sum of two terms, the mean of its tokens and the rest, each rounded with scales
of its own. With a weight W, and a gradient D:

    X = 1 m + R,    X W ≈ 1 (Q(m) Q(W)) + Q(R) Q(W)
    D = 1 d + S,    Dᵀ X ≈ (1 Q(d) + Q(S))ᵀ (1 Q(m) + Q(R))

The product of a mean with a rest is zero before rounding. It stays in wgrad, as in the paper. The
tokens are those of a rank's micro-batch. The paper does not say which elements of the mean share a
scale; here they are 16 features.
"""

from mqo.quant import QuantizerContext, quantizer, round_term
from torch import Tensor


@quantizer(
    "averis", terms=2, stochastic=True, options={"format": "nvfp4", "rounding": "stochastic"}
)
def averis(x: Tensor, context: QuantizerContext) -> list[tuple[Tensor, float]]:
    """Return the rounded mean, the same for every token, and the rounded rest.

    Options:
        format: of both terms, and of the weight, which is a single term.
        rounding: of all of them.
    """
    choices = {"rounding": context.options["rounding"]}
    kind = context.options["format"]
    if context.operand == "weight":
        return [round_term(x, kind, context, **choices)]
    tokens = 1 if context.site == "wgrad" else 0  # x is [tokens, features]; in wgrad its transpose
    # In float64, because the order of the sum depends on the number of features that a rank has.
    mean = x.double().mean(tokens, keepdim=True).float()
    # A block of the mean has features, in wgrad as well, where those of the rest have tokens.
    values, alpha = round_term(mean.reshape(1, -1), kind, context, **choices)
    rest = round_term(x - mean, kind, context, **choices)
    return [(values.reshape(mean.shape).expand_as(x), alpha), rest]
