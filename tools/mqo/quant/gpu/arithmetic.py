"""The steps of the kernels, on the device: amax of each block, scale, round, store.

All of it is float32 arithmetic, which the definitions are, too. That asks for three things:

- Subnormals are kept. Triton compiles for a device without flushing them (a test looks for `.ftz`).
  In the interpreter, torch.set_flush_denormal(True) flushes them as it does the reference's.
- A division rounds to nearest: `div_rn`, since Triton's `/` does not.
- No product that rounds goes into a sum, where it could become a part of an fma: a clamp comes
  between. Products with powers of two are exact, and an fma of them is the same.

Largest magnitudes are compared as int32 patterns, where a NaN is the largest.
"""

# ruff: noqa: N803  what is known at compile time has a name in capitals, as is Triton's custom
import torch
import triton
import triton.language as tl

# -- numbers ---------------------------------------------------------------------------------------

_INFINITY = tl.constexpr(0x7F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SMALLEST_NORMAL = tl.constexpr(0x00800000)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _as_float(pattern) -> tl.tensor:
    return pattern.to(tl.float32, bitcast=True)


@triton.jit
def _as_pattern(values) -> tl.tensor:
    return values.to(tl.int32, bitcast=True)


@triton.jit
def _power_of_two(exponent) -> tl.tensor:
    """Return 2^exponent, for -127 <= exponent <= 127; the first is subnormal."""
    return _as_float(tl.where(exponent == -127, 0x00400000, (exponent + 127) << 23))


_BY_HARDWARE = tl.constexpr(isinstance(_as_float, triton.JITFunction))


@triton.jit
def _bfloat16_bits(values) -> tl.tensor:
    """Round float32 to nearest even, as int16; the interpreter, which cannot, has it computed."""
    if _BY_HARDWARE:
        return values.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        pattern = _as_pattern(values)
        rounded = (pattern + (0x7FFF + ((pattern >> 16) & 1))) >> 16
        return tl.where(values == values, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def to_bfloat16(values) -> tl.tensor:
    """Round float32 to the values of bfloat16."""
    return loaded(_bfloat16_bits(values))


GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)


@triton.jit
def draw_from(state) -> tl.tensor:
    """Return what elements draw, of seed + (index + 1) * GOLDEN."""
    z = state.to(tl.uint64)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 40).to(tl.int32)


# -- dtypes ----------------------------------------------------------------------------------------


@triton.jit
def loaded(values) -> tl.tensor:
    """Return float32; int16 holds bfloat16, which the interpreter does not round."""
    if values.dtype == tl.int16:
        if _BY_HARDWARE:  # two at a time
            return tl.inline_asm_elementwise(
                "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
                "=r,=r,r",
                [values],
                dtype=tl.float32,
                is_pure=True,
                pack=2,
            )
        return _as_float(values.to(tl.int32) << 16)
    else:
        return values.to(tl.float32)


@triton.jit
def stored(values, dtype: tl.constexpr, EXACT: tl.constexpr) -> tl.tensor:
    """Round to a dtype, to nearest even."""
    if dtype == tl.int16 and EXACT:
        return (_as_pattern(values) >> 16).to(tl.int16)
    elif dtype == tl.int16:
        return _bfloat16_bits(values)
    else:
        return values.to(dtype)


# -- rounding to an element's values ------------------------------------------------


@triton.jit
def round_to(values, draw, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr) -> tl.tensor:
    """Round float32 to values of the element; tapered ones may be NaN, and pass."""
    if ELEMENT.widths:
        magnitude = tl.minimum(tl.abs(values), ELEMENT.top, tl.PropagateNan.ALL)
    else:
        magnitude = tl.minimum(tl.abs(values), ELEMENT.top)
    exponent = _as_pattern(magnitude) & _INFINITY
    if ROUNDING == "stochastic":
        rounded = _round_by_draw(magnitude, _quanta(exponent, 0, ELEMENT), draw)
    else:
        # A sum with 2^23 quanta has a quantum as its unit, and taking them away again is exact.
        quanta = _quanta(exponent, 23, ELEMENT)
        if ELEMENT.widths and ROUNDING == "nearest-even":
            # Ties go by the code's last bit, which alternates along the grid. Where there is no
            # mantissa, 2^e has the even code where e is odd: a quantum more, and sums are as even.
            power = tl.maximum(exponent, ELEMENT.smallest)
            odd = ((power >> 23) + 1) & 1
            quanta += tl.where(quanta == power + (23 << 23), odd, 0)
        if ROUNDING == "nearest-away":
            # This takes a tie up, and nothing else anywhere: halves of a quantum end in zeros.
            magnitude = _as_float(_as_pattern(magnitude) | 1)
        rounded = (magnitude + _as_float(quanta)) - _as_float(quanta)
    if ELEMENT.limit < ELEMENT.top:
        beyond: tl.constexpr = float("inf") if ELEMENT.infinite else ELEMENT.limit
        rounded = tl.where(rounded > ELEMENT.limit, beyond, rounded)
    rounded = _with_sign(rounded, values)
    return rounded if ELEMENT.signed_zero else rounded + 0.0  # what was -0.0 is 0.0


@triton.jit
def _quanta(exponent, MORE: tl.constexpr, ELEMENT: tl.constexpr) -> tl.tensor:
    """Return the pattern of 2^MORE quanta at the pattern of a power of two."""
    if ELEMENT.widths:
        power = tl.maximum(exponent, ELEMENT.smallest)
        bits = (ELEMENT.widths >> (tl.abs((power >> 23) - 127) & 28)) & 3
        return power + ((MORE - bits) << 23)
    else:
        more: tl.constexpr = (MORE - ELEMENT.bits) << 23
        return tl.maximum(exponent + more, ELEMENT.smallest + more)  # one instruction


@triton.jit
def _with_sign(values, signed) -> tl.tensor:
    return _as_float(_as_pattern(values) | (_as_pattern(signed) & -0x80000000))


@triton.jit
def _round_by_draw(magnitude, quantum, draw) -> tl.tensor:
    """Round up where the draw is below the share of a quantum, in 2^-24."""
    inverse = _as_float((254 << 23) - quantum)
    steps = (magnitude * inverse * 2.0**24).to(tl.int32)
    rounded = ((steps + (0xFFFFFF - draw)) >> 24).to(tl.float32) * _as_float(quantum)
    return tl.where(magnitude == magnitude, rounded, magnitude)


# -- scales; what multiplies a block's elements before and after --------------------


@triton.jit
def _nan_unless_finite(amax, decode) -> tl.tensor:
    """Make a result NaN, whatever it was rounded to, by the last of its factors."""
    nan = _as_float(tl.full(decode.shape, 0x7FC00000, tl.int32))
    return tl.where(amax < _INFINITY, decode, nan)


@triton.jit
def _over(numerator: tl.constexpr, values) -> tl.tensor:
    if _BY_HARDWARE and numerator == 1.0:
        # Half the instructions; libdevice's flushes subnormals.
        return tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=r,r", [values], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.div_rn(tl.full(values.shape, numerator, tl.float32), values)


@triton.jit
def _to_top(amax, TOP: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Take an amax to TOP."""
    encode = tl.where(amax == 0, 1.0, tl.minimum(_over(TOP, _as_float(amax)), _LARGEST))
    return encode, _nan_unless_finite(amax, _over(1.0, encode))


@triton.jit
def _e8m0(amax, EMAX: tl.constexpr, CARRY: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    # A subnormal's pattern is its multiple of 2^-149; as a float32 it is normal, and its exponent
    # is 149 too large.
    normal = tl.where(amax < _SMALLEST_NORMAL, _as_pattern(amax.to(tl.float32)) - (149 << 23), amax)
    exponent = ((normal + CARRY) >> 23) - (127 + EMAX)
    exponent = tl.minimum(tl.maximum(exponent, -127), 127)
    return _power_of_two(-exponent), _nan_unless_finite(amax, _power_of_two(exponent))


@triton.jit
def _two_level(
    amax, tensor_amax, TOP: tl.constexpr, ELEMENT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    total, inverse = _to_top(tensor_amax, ELEMENT.top * TOP)
    share = total * (1 / TOP)  # one factor for both, as the published code has it: it rounds once
    amax = tl.where(amax > _INFINITY, 0, amax)
    decode = round_to(_as_float(amax) * share, 0, ELEMENT, "nearest-even") * inverse
    return tl.minimum(_over(1.0, decode), _LARGEST), decode


@triton.jit
def _hif4(amax, ELEMENT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Give 64 elements a scale, each 8 of them a power of two, and each 4, whose amax it is, one.

    The scale is an E6M2.
    """
    fours = tl.reshape(amax, [amax.numel // 16, 8, 2])
    eights = tl.max(fours, axis=2, keep_dims=True)
    whole = tl.max(eights, axis=1, keep_dims=True)
    scale = to_bfloat16(_as_float(whole) * 0.142578125)  # 1/7, a bfloat16
    scale = round_to(tl.maximum(scale, 2.0**-48), 0, ELEMENT, "nearest-even")
    inverse = to_bfloat16(_over(1.0, scale))
    eight = (_as_float(eights) * inverse >= 4.0).to(tl.int32)
    half = _as_float(_as_pattern(inverse) - (eight << 23))
    four = (_as_float(fours) * half >= 2.0).to(tl.int32)
    encode = _as_float(_as_pattern(half) - (four << 23))
    decode = _as_float(_as_pattern(scale) + ((eight + four) << 23))
    decode = _nan_unless_finite(whole, decode)
    return tl.reshape(encode, amax.shape), tl.reshape(decode, amax.shape)


@triton.jit
def _larger(a, b) -> tl.tensor:
    return tl.maximum(a, b, tl.PropagateNan.ALL)


@triton.jit
def _block_amax(tile, SIDE: tl.constexpr) -> tl.tensor:
    # Zeros beyond the tensor's end change neither an amax nor whether it is finite.
    if _BY_HARDWARE:  # one instruction an element
        amax = tl.reduce(tl.abs(tile), 3, _larger, keep_dims=True)
        return _as_pattern(tl.reduce(amax, 1, _larger, keep_dims=True) if SIDE > 1 else amax)
    else:
        amax = tl.max(_as_pattern(tile) & _MAGNITUDE, axis=3, keep_dims=True)
        return tl.max(amax, axis=1, keep_dims=True) if SIDE > 1 else amax


@triton.jit
def factors(tile, tensor_amax, STEPS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return what multiplies the elements of a tile [.., side, runs, run], before and after."""
    if STEPS.scale == "none":
        return 1.0, 1.0
    elif STEPS.scale == "tensor-power":
        amax = _as_pattern(tl.load(tensor_amax))
        scaled = (amax > 0) & (amax < _INFINITY)  # else by 1
        return _e8m0(tl.where(scaled, amax, (127 + STEPS.emax) << 23), STEPS.emax, 0)
    elif STEPS.scale == "tensor":
        return _to_top(_as_pattern(tl.load(tensor_amax)), STEPS.element.top)
    elif STEPS.scale == "e8m0":
        return _e8m0(_block_amax(tile, STEPS.side), STEPS.emax, STEPS.carry)
    elif STEPS.scale == "fp32":
        return _to_top(_block_amax(tile, STEPS.side), STEPS.element.top)
    elif STEPS.scale == "two-level":
        whole = _as_pattern(tl.load(tensor_amax))
        amax = _block_amax(tile, STEPS.side)
        return _two_level(amax, whole, STEPS.element.top, STEPS.scale_element)
    else:
        return _hif4(_block_amax(tile, STEPS.side), STEPS.scale_element)


# -- a tile, through all of its steps --------------------------------------------------------------


@triton.jit
def quantized(
    tile, draw, tensor_amax, STEPS: tl.constexpr, GIVEN: tl.constexpr = True
) -> tl.tensor:
    """Quantize a float32 tile [rows, columns] of whole blocks along its rows; `draw` as the tile.

    `tensor_amax` points to the tensor's amax where its scales follow from that, else it is None.
    GIVEN says that it may be of other values than the tensor's, NaN left out.
    """
    shape: tl.constexpr = [
        tile.shape[0] // STEPS.side,
        STEPS.side,
        tile.shape[1] // STEPS.run,
        STEPS.run,
    ]
    values = tl.reshape(tile, shape)
    encode, decode = factors(values, tensor_amax, STEPS)
    values *= encode
    if STEPS.scale == "hif4":
        values = to_bfloat16(values)
    if GIVEN and tensor_amax is not None and not STEPS.element.widths:
        # These elements have no code for a NaN.
        values = tl.where(values == values, values, 0.0)
    rounded = round_to(values, tl.reshape(draw, shape), STEPS.element, STEPS.rounding)
    return tl.reshape(rounded * decode, tile.shape)
