"""Packed storage: bit-equal to fake_quantize, its layout, its size, every code and scale."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mqo.quant.backend import ENVIRONMENT_VARIABLE, fake_quantize, fields_of
from mqo.quant.codes import code_values
from mqo.quant.formats import BLOCK_SIZES, FORMATS, ROUNDINGS, SCALE_RULES, TILES
from mqo.quant.packing import PackedTensor, pack
from mqo.quant.scales import Stored
from mqo.quant.spec import QuantSpec
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from .mx import MX_ELEMENTS
from .tensors import DTYPES, KINDS, every_dtype, every_kind

MX_KINDS = tuple(MX_ELEMENTS)

SPECIALS = (0.0, -0.0, math.inf, -math.inf, math.nan, 65504.0, 3.3e38, 2.0**-149, -(2.0**-130))


@pytest.fixture(scope="module", autouse=True)
def without_kernels():
    """The reference quantizes: a kernel for each choice takes long to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT_VARIABLE, "reference")
        yield


class Calls(TorchDispatchMode):
    """The names of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


@st.composite
def tensors(draw):
    """A tensor of some shape (empty ones too), dtype and layout, with specials, and an axis."""
    shape = draw(st.lists(st.integers(0, 40), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(*(2 * size for size in shape), generator=generator)
    x = x * torch.exp(draw(st.sampled_from((0.0, 4.0, 20.0))) * torch.randn(x.shape))
    for value in draw(st.lists(st.sampled_from(SPECIALS), max_size=3)):
        if x.numel():
            x.view(-1)[draw(st.integers(0, x.numel() - 1))] = value
    x = x.to(draw(st.sampled_from(DTYPES)))
    x = x[tuple(slice(None, None, 2) for _ in shape)] if draw(st.booleans()) else x
    x = x.permute(draw(st.permutations(range(len(shape)))))
    return x, draw(st.integers(-len(shape), len(shape) - 1))


specs = st.builds(
    QuantSpec,
    st.sampled_from(KINDS),
    st.sampled_from(BLOCK_SIZES),
    st.sampled_from(SCALE_RULES),
    st.sampled_from(ROUNDINGS),
    st.sampled_from(("saturate", "inf")),
    st.booleans(),
    st.sampled_from(TILES),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(tensors(), specs, st.integers(0, 2**64 - 1))
def test_unpacking_gives_what_quantizing_gives(assert_same_bits, tensor_and_axis, spec, seed):
    x, axis = tensor_and_axis
    packed = pack(x, spec, axis, seed)
    assert_same_bits(packed.unpack(), fake_quantize(x, spec, axis=axis, seed=seed))
    assert packed.codes.dtype == torch.uint8
    assert packed.unpack().is_contiguous()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(tensors(), specs, st.integers(0, 2**64 - 1))
def test_the_operators_give_the_same_and_fake_tensors_its_shapes(
    assert_same_bits, tensor_and_axis, spec, seed
):
    x, axis = tensor_and_axis
    packed = pack(x, spec, axis, seed)
    with Calls() as calls:
        called = pack(x, spec, axis, seed)
        assert_same_bits(called.unpack(), packed.unpack())
    assert {"megatron_quant::pack", "megatron_quant::unpack"} <= calls.names
    assert called.codes.equal(packed.codes)
    with FakeTensorMode() as mode:
        fake = pack(mode.from_tensor(x), spec, axis, seed)
        assert fake.unpack().shape == x.shape
    assert storage(fake) == storage(packed)


def test_the_operators_keep_torchs_rules():
    x, spec = torch.randn(8, 64), QuantSpec("nvfp4")
    fields = fields_of(spec)
    torch.library.opcheck(torch.ops.megatron_quant.pack, (x, None, -1, 0, *fields))
    packed = pack(x, spec)
    arguments = (packed.codes, torch.empty_like(x), *packed.scales, -1, *fields)
    torch.library.opcheck(torch.ops.megatron_quant.unpack, arguments)


def storage(packed):
    """Shapes and dtypes of what a packed tensor keeps."""
    return [(one.shape, one.dtype) for one in (packed.codes, *packed.scales)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(tensors(), specs)
def test_codes_and_scales_have_no_padding(tensor_and_axis, spec):
    x, axis = tensor_and_axis
    packed = pack(x, spec, axis, seed=1)
    size = x.shape[axis]
    rows = math.prod(x.movedim(axis, -1).shape[:-1])
    row = spec.format
    if spec.block is None:
        codes, scales = x.numel(), int(spec.tensor_scale and row.scale == "none")
    else:
        codes = rows * -(-size * row.code_bits // 8)
        scales = rows * -(-size // spec.block) * row_bytes(spec.quant_type)
    assert packed.nbytes == codes + scales + 4 * row.needs_tensor_amax
    assert (packed.shape, packed.dtype) == (x.shape, x.dtype)


def row_bytes(kind):
    """Bytes of a block's scale."""
    return {"hif4": 4, "fp8_block_fp32": 4, "ufp4": 4}.get(kind, 1)


@every_kind
def test_bits_of_an_element_are_those_that_the_planner_counts(kind):
    packed = pack(torch.randn(16, 256), QuantSpec(kind))
    own = 4 * FORMATS[kind].needs_tensor_amax
    assert (packed.nbytes - own) / 4096 == FORMATS[kind].packed_bytes


def test_codes_of_six_bits_lie_four_in_three_bytes_the_first_one_low():
    # Scale 1 (amax 7.5): codes 8 (1.0), 31 (7.5), 33 (-0.125), 0, 40 (-1.0).
    packed = pack(torch.tensor([[1.0, 7.5, -0.125, 0.0, -1.0]]), QuantSpec("mxfp6_e2m3"))
    assert packed.codes.tolist() == [[8 | 31 << 6 & 0xFF, 31 >> 2 | 33 << 4 & 0xFF, 33 >> 4, 40]]
    assert packed.scales.block.tolist() == [[127]]


def test_codes_of_mxint8_are_twos_complements():
    packed = pack(torch.tensor([1.0, -1.0, 1 / 64, -1 / 64, -0.0]), QuantSpec("mxint8"))
    assert packed.codes.tolist() == [64, 192, 1, 255, 0]


def test_the_packed_axis_is_the_last_of_the_codes():
    packed = pack(torch.randn(70, 3), QuantSpec("mxfp4", block=16), axis=0)
    assert packed.codes.shape == (3, 35)
    assert packed.scales.block.shape == (3, 5)


def test_codes_of_hifp8_are_the_published_ones():
    x = torch.tensor([[0.0, 1.0, -1.0, 32768.0], [math.nan, math.inf, -math.inf, 2.0**-22]])
    packed = pack(x, QuantSpec("hifp8", overflow="inf"))
    assert packed.codes.tolist() == [[0x00, 0x08, 0x88, 0x6E], [0x80, 0x6F, 0xEF, 0x01]]
    assert packed.nbytes == 8


def test_a_tensor_scale_is_one_byte():
    packed = pack(torch.tensor([1.0, -0.75]), QuantSpec("hifp8", tensor_scale=True))
    assert packed.scales.block.tolist() == [127 - 3]
    assert packed.unpack().tolist() == [1.0, -0.75]


@pytest.mark.parametrize("kind", MX_KINDS)
def test_a_block_with_a_special_value_has_the_nan_scale_and_no_codes(kind):
    x = torch.ones(64)
    x[40] = math.inf
    packed = pack(x, QuantSpec(kind))
    assert packed.scales.block[1] == 255
    assert packed.codes[len(packed.codes) // 2 :].eq(0).all()
    assert packed.unpack().isnan().tolist() == [False] * 32 + [True] * 32


@pytest.mark.parametrize("kind", MX_KINDS)
def test_a_block_of_zeros_has_the_smallest_scale(kind):
    assert pack(torch.zeros(32), QuantSpec(kind)).scales.block.tolist() == [0]


def pairs(kind, dtype):
    """Every code under every scale byte, as a packed tensor, and its value by plain arithmetic."""
    values = torch.tensor(code_values(kind), dtype=torch.float64)
    scales = torch.exp2(torch.arange(256.0, dtype=torch.float64) - 127)
    scales[255] = math.nan
    codes = torch.arange(len(values), dtype=torch.uint8).expand(256, -1)
    # A block holds 16 codes; all blocks of a row share the row's scale.
    blocks = len(values) // 16
    bytes_ = torch.arange(256).to(torch.uint8).unsqueeze(1).expand(-1, blocks)
    bits = np.unpackbits(codes.unsqueeze(-1).numpy(), axis=-1, bitorder="little")
    used = bits[..., : FORMATS[kind].code_bits].reshape(256, -1)
    packed = torch.from_numpy(np.packbits(used, axis=-1, bitorder="little"))
    spec, shape = QuantSpec(kind, block=16), torch.Size((256, len(values)))
    stored = Stored(bytes_, torch.empty(0))
    return PackedTensor(packed, stored, shape, dtype, spec, -1), (values * scales[:, None])


@pytest.mark.parametrize("kind", MX_KINDS)
@every_dtype
def test_every_code_under_every_scale_unpacks_exactly(assert_same_bits, kind, dtype):
    packed, exact = pairs(kind, dtype)
    assert_same_bits(packed.unpack(), exact.to(dtype))


@pytest.mark.parametrize("kind", MX_KINDS)
@every_dtype
def test_every_value_under_every_scale_passes_through_pack(assert_same_bits, kind, dtype):
    # One element a block; where a dtype cannot hold a value, nothing is to be kept.
    exact = pairs(kind, dtype)[1].flatten()
    held = exact[(exact.to(dtype).double() == exact) & exact.isfinite()].to(dtype).unsqueeze(1)
    assert len(held) > (1000 if dtype == torch.float16 else 3000)
    # The other rules choose scales by which a lone 15 is 480, beyond E4M3, or 7.5 is no E2M1 value.
    packed = pack(held, QuantSpec(kind, scale_rule="rceil", block=16))
    assert_same_bits(packed.unpack(), held)


def test_a_scalar_can_be_packed_as_hifp8():
    packed = pack(torch.tensor(1.06), QuantSpec("hifp8"))
    assert packed.codes.tolist() == 0x08
    assert packed.unpack() == 1.0
    scaled = pack(torch.tensor(-3e5), QuantSpec("hifp8", tensor_scale=True))
    assert scaled.unpack() == -294912.0  # -9 * 2^15


@pytest.mark.parametrize("kind", ["fp8_tensor_e4m3", "fp8_tensor_e5m2"])
def test_a_scalar_is_its_own_largest_magnitude(kind):
    packed = pack(torch.tensor(-2.0), QuantSpec(kind))
    assert packed.unpack() == fake_quantize(torch.tensor(-2.0), QuantSpec(kind)) == -2.0


def test_what_float16_cannot_hold_is_packed_all_the_same():
    x = torch.tensor([65504.0], dtype=torch.float16)
    packed = pack(x, QuantSpec("mxfp8", scale_rule="ceil"))
    assert packed.unpack().tolist() == [math.inf]
    assert code_values("mxfp8")[packed.codes] * 2.0 ** (packed.scales.block - 127.0) == 65536.0


def test_what_quantizing_refuses_packing_refuses():
    with pytest.raises(ValueError, match="'none'; valid: mxfp8, mxfp4, hifp8, mxfp8_e5m2"):
        pack(torch.zeros(4), QuantSpec("none"))
    with pytest.raises(ValueError, match="axis 1; valid: -1, 0"):
        pack(torch.zeros(4), QuantSpec("mxfp8"), axis=1)
    with pytest.raises(ValueError, match="seed None; valid: "):
        pack(torch.zeros(4), QuantSpec("mxfp8", rounding="stochastic"))
    with pytest.raises(TypeError, match=r"torch\.int32; valid: torch\.float32"):
        pack(torch.zeros(4, dtype=torch.int32), QuantSpec("mxfp8"))
