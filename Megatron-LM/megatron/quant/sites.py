"""The five GEMM sites that can be quantised, and the axis each operand is quantised along."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GemmSite:
    """One GEMM of the model: the names of its two operands and their contraction axes.

    MX blocks must run along the contraction axis, or the shared scales could not be taken out
    of a dot product.
    """

    name: str
    lhs: str
    lhs_axis: int
    rhs: str
    rhs_axis: int


SITES = {
    site.name: site
    for site in (
        # x [..., K] times weight [N, K]
        GemmSite("fprop", "x", -1, "weight", -1),
        # grad [..., N] times weight [N, K]
        GemmSite("dgrad", "grad", -1, "weight", 0),
        # grad [tokens, N] times x [tokens, K]
        GemmSite("wgrad", "grad", 0, "x", 0),
        # query [s, b*h, d] times key [s, b*h, d]
        GemmSite("qk", "query", -1, "key", -1),
        # probs [b*h, sq, sk] times value [sk, b*h, d]
        GemmSite("pv", "probs", -1, "value", 0),
    )
}
