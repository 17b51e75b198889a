"""What a simulation counts: kinds of memory, operations and exchanges. No import needs torch."""

from typing import NamedTuple

KINDS = ("weights", "gradients", "optimizer", "activations", "logits", "quantizer", "temporary")


class Work(NamedTuple):
    """An operation on one rank: `flops`, and `size`, the bytes that it reads and writes.

    For a product, `gemm` is its site, or else the operation, followed by " backward" in autograd's
    backward pass; `shape` is (batch, m, n, k), and `quant_type` is the type of its operands. For
    other operations `gemm` is the name of the operation or of a fused region, without shape and
    FLOPs. `masked` is the share of FLOPs that a kernel skips because of a causal mask. `operands`
    are the numbers of elements of a product's operands, and of query and key in attention.
    """

    layer: str
    gemm: str
    quant_type: str | None
    shape: tuple[int, ...]
    flops: int
    size: int
    masked: float = 0.0
    operands: tuple[int, int] = (0, 0)


class Exchange(NamedTuple):
    """A kind of exchange. `size` is the bytes of the whole tensor on one rank.

    `ranks` is the size of the group, `nodes` the number of nodes that it spans.
    """

    operation: str
    group: str
    ranks: int
    nodes: int
    size: int

    @property
    def wire(self) -> int:
        """Return the bytes that a rank sends in a ring."""
        share = (self.ranks - 1) / self.ranks
        parts = {"all-reduce": 2 * share, "broadcast": 1, "send": 1, "receive": 0, "reduce": 1}
        return int(self.size * parts.get(self.operation, share))
