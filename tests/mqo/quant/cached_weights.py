"""The size of the cache of quantized weights."""

from mqo.quant import weights


def cached_bytes():
    copies = (rounded for kept in weights._entries.values() for _, rounded in kept.values())
    return sum(term.tensor.nbytes for rounded in copies for term in rounded.terms)
