"""The five GEMM sites that can be quantised, and the axis each operand is quantised along."""

from dataclasses import dataclass

LINEAR, ATTENTION = "linear", "attention"


@dataclass(frozen=True)
class GemmSite:
    """One GEMM of the model: the names of its two operands and their contraction axes.

    `layer` is the kind of layer that it belongs to, LINEAR or ATTENTION. MX blocks must run along
    the contraction axis, or the shared scales could not be taken out of a dot product.
    """

    name: str
    layer: str
    lhs: str
    lhs_axis: int
    rhs: str
    rhs_axis: int


SITES = {
    site.name: site
    for site in (
        # x [..., K] times weight [N, K]
        GemmSite("fprop", LINEAR, "x", -1, "weight", -1),
        # grad [..., N] times weight [N, K]
        GemmSite("dgrad", LINEAR, "grad", -1, "weight", 0),
        # grad [tokens, N] times x [tokens, K]
        GemmSite("wgrad", LINEAR, "grad", 0, "x", 0),
        # query [s, b, h, d] times key [s, b, groups, d] where fused; else both [s, b*h, d]
        GemmSite("qk", ATTENTION, "query", -1, "key", -1),
        # probs [b*h, sq, sk] times value [sk, b*h, d]
        GemmSite("pv", ATTENTION, "probs", -1, "value", 0),
    )
}
