"""Tensors, specs and marks that the tests of quantizers share."""

import pytest
import torch
from hypothesis import strategies as st
from mqo.quant.formats import (
    BLOCK_SIZES,
    FORMATS,
    HADAMARD_POINTS,
    HADAMARD_SIGNS,
    OVERFLOWS,
    ROUNDINGS,
    SCALE_RULES,
    TILES,
)
from mqo.quant.spec import Hadamard, QuantSpec

KINDS = tuple(FORMATS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_kind = pytest.mark.parametrize("kind", KINDS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_size = pytest.mark.parametrize("points", HADAMARD_POINTS)
wide_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])

specs = st.builds(
    QuantSpec,
    st.sampled_from(KINDS),
    block=st.sampled_from(BLOCK_SIZES),
    scale_rule=st.sampled_from(SCALE_RULES),
    rounding=st.sampled_from((None, *ROUNDINGS)),
    overflow=st.sampled_from(OVERFLOWS),
    tensor_scale=st.booleans(),
    tile=st.sampled_from(TILES),
    without_alpha=st.booleans(),
)
hadamards = st.builds(
    Hadamard, st.sampled_from(HADAMARD_POINTS), signs=st.sampled_from(HADAMARD_SIGNS)
)


class OtherTensor(torch.Tensor):
    """A class of tensors that a quantizer does not know."""


def normal(*shape, seed=0, dtype=torch.float32):
    """Return normal numbers, reproducibly."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
