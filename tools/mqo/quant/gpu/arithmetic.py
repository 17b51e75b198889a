"""The steps of the kernels, on the device: amax of each block, scale, round, store.

All of it is float32 arithmetic, as in the definitions. This has three requirements:

- Subnormals are kept. Triton compiles for a device without flushing them (a test looks for `.ftz`).
  In the interpreter, torch.set_flush_denormal(True) flushes them, as in the reference.
- Division rounds to nearest: `div_rn`, since Triton's `/` does not.
- A product that rounds is not an operand of a sum, because both could become an fma: a clamp
  separates them. Products with powers of two are exact, so an fma does not change the result.

Magnitudes are compared as int32 patterns, in which a NaN is the largest.
"""

# ruff: noqa: N803  names of compile-time values are in capitals, as is usual with Triton
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
    """Return 2^exponent, for -127 <= exponent <= 127; 2^-127 is subnormal."""
    return _as_float(tl.where(exponent == -127, 0x00400000, (exponent + 127) << 23))


_BY_HARDWARE = tl.constexpr(isinstance(_as_float, triton.JITFunction))


@triton.jit
def _bfloat16_bits(values) -> tl.tensor:
    """Round float32 to nearest even, as int16; the interpreter needs integer arithmetic for it."""
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
    """Return the draws of elements from seed + (index + 1) * GOLDEN."""
    z = state.to(tl.uint64)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 40).to(tl.int32)


# -- dtypes ----------------------------------------------------------------------------------------


@triton.jit
def loaded(values) -> tl.tensor:
    """Return float32; bfloat16 is passed as int16, since the interpreter cannot round to it."""
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
    """Round to nearest even in a dtype."""
    if dtype == tl.int16 and EXACT:
        return (_as_pattern(values) >> 16).to(tl.int16)
    elif dtype == tl.int16:
        return _bfloat16_bits(values)
    else:
        return values.to(dtype)


# -- rounding to an element's values ------------------------------------------------


@triton.jit
def round_to(values, draw, ELEMENT: tl.constexpr, ROUNDING: tl.constexpr) -> tl.tensor:
    """Round float32 to values of the element; a NaN of a tapered element passes through."""
    if ELEMENT.widths:
        magnitude = tl.minimum(tl.abs(values), ELEMENT.top, tl.PropagateNan.ALL)
    else:
        magnitude = tl.minimum(tl.abs(values), ELEMENT.top)
    exponent = _as_pattern(magnitude) & _INFINITY
    if ROUNDING == "stochastic":
        rounded = _round_by_draw(magnitude, _quanta(exponent, 0, ELEMENT), draw)
    else:
        # A sum with 2^23 quanta has the quantum as its unit, and subtracting them again is exact.
        quanta = _quanta(exponent, 23, ELEMENT)
        if ELEMENT.widths and ROUNDING == "nearest-even":
            # Ties depend on the last bit of the code, which alternates along the grid. Without a
            # mantissa, the code of 2^e is even if e is odd: one more quantum makes sums as even.
            power = tl.maximum(exponent, ELEMENT.smallest)
            odd = ((power >> 23) + 1) & 1
            quanta += tl.where(quanta == power + (23 << 23), odd, 0)
        if ROUNDING == "nearest-away":
            # This rounds ties up and changes nothing else: halves of a quantum end in zeros.
            magnitude = _as_float(_as_pattern(magnitude) | 1)
        rounded = (magnitude + _as_float(quanta)) - _as_float(quanta)
    if ELEMENT.limit < ELEMENT.top:
        beyond: tl.constexpr = float("inf") if ELEMENT.infinite else ELEMENT.limit
        rounded = tl.where(rounded > ELEMENT.limit, beyond, rounded)
    rounded = _with_sign(rounded, values)
    return rounded if ELEMENT.signed_zero else rounded + 0.0  # -0.0 becomes 0.0


@triton.jit
def _quanta(exponent, MORE: tl.constexpr, ELEMENT: tl.constexpr) -> tl.tensor:
    """Return the pattern of 2^MORE quanta for the pattern of a power of two."""
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
    """Round up if the draw is below the share of a quantum, in units of 2^-24."""
    inverse = _as_float((254 << 23) - quantum)
    steps = (magnitude * inverse * 2.0**24).to(tl.int32)
    rounded = ((steps + (0xFFFFFF - draw)) >> 24).to(tl.float32) * _as_float(quantum)
    return tl.where(magnitude == magnitude, rounded, magnitude)


# -- scales: the factors of a block's elements before and after rounding ------------


@triton.jit
def _nan_unless_finite(amax, decode) -> tl.tensor:
    """Replace the last factor by NaN if amax is not finite, so that the result is NaN."""
    nan = _as_float(tl.full(decode.shape, 0x7FC00000, tl.int32))
    return tl.where(amax < _INFINITY, decode, nan)


@triton.jit
def _over(numerator: tl.constexpr, values) -> tl.tensor:
    if _BY_HARDWARE and numerator == 1.0:
        # Half as many instructions; libdevice's reciprocal flushes subnormals.
        return tl.inline_asm_elementwise(
            "rcp.rn.f32 $0, $1;", "=r,r", [values], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.div_rn(tl.full(values.shape, numerator, tl.float32), values)


@triton.jit
def _to_top(amax, TOP: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the factors that map amax to TOP, and back."""
    encode = tl.where(amax == 0, 1.0, tl.minimum(_over(TOP, _as_float(amax)), _LARGEST))
    return encode, _nan_unless_finite(amax, _over(1.0, encode))


@triton.jit
def _e8m0(amax, EMAX: tl.constexpr, CARRY: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    # The pattern of a subnormal is its multiple of 2^-149; converted to float32 it is normal, with
    # an exponent that is 149 too large.
    normal = tl.where(amax < _SMALLEST_NORMAL, _as_pattern(amax.to(tl.float32)) - (149 << 23), amax)
    exponent = ((normal + CARRY) >> 23) - (127 + EMAX)
    exponent = tl.minimum(tl.maximum(exponent, -127), 127)
    return _power_of_two(-exponent), _nan_unless_finite(amax, _power_of_two(exponent))


@triton.jit
def _one_level(tile, STEPS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    amax = _block_amax(tile, STEPS.side)
    scale, encode = _levels(tile, amax, 1 / STEPS.element.top, 1.0, STEPS)
    return encode, _nan_unless_finite(amax, scale)


@triton.jit
def _two_level(tile, tensor_amax, STEPS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    total, inverse = _to_top(tensor_amax, STEPS.top)
    # One factor for both, as in the published code: it rounds once.
    share = total * (1 / STEPS.element.top)
    scale, encode = _levels(tile, _block_amax(tile, STEPS.side), share, inverse, STEPS)
    return encode, scale * inverse if STEPS.alpha else _nan_unless_finite(tensor_amax, scale)


@triton.jit
def _levels(tile, amax, share, inverse, STEPS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the scales of blocks, and the factors before rounding."""
    exact = _as_float(tl.where(amax > _INFINITY, 0, amax)) * share
    scale = round_to(exact, 0, STEPS.scale_element, "nearest-even")
    encode = tl.minimum(_over(1.0, scale * inverse), _LARGEST)
    if STEPS.error != "":
        four = round_to(exact * STEPS.four, 0, STEPS.scale_element, "nearest-even")
        encode_four = tl.minimum(_over(1.0, four * inverse), _LARGEST)
        is_smaller = _error(tile, four, encode_four, STEPS) < _error(tile, scale, encode, STEPS)
        is_four = is_smaller | (scale == 0)
        scale = tl.where(is_four, four, scale)
        encode = tl.where(is_four, encode_four, encode)
    return scale, encode


@triton.jit
def _error(tile, scale, encode, STEPS: tl.constexpr) -> tl.tensor:
    """Return the errors of blocks with these scales.

    Clamps separate products from sums. They change only errors of two scales that are equal, and of
    those that are 0. A sum of integers is the same in any order.
    """
    steps = tl.minimum(tl.abs(tile) * encode, 16.0)
    off = tl.abs(round_to(steps, 0, STEPS.element, "nearest-even") - steps)
    factor = scale
    if STEPS.error == "mse":
        off, factor = tl.minimum(off * off, 15.0), scale * scale
    anchor = tl.full(off.shape, STEPS.anchor, tl.float32)
    units = _as_pattern(off + anchor) - _as_pattern(anchor)
    units = tl.sum(units, axis=3, keep_dims=True)
    if STEPS.side > 1:
        units = tl.sum(units, axis=1, keep_dims=True)
    return units.to(tl.float32) * factor


@triton.jit
def _hif4(amax, ELEMENT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the factors of each 4 elements, whose amax is given.

    64 elements share an E6M2, each 8 of them a power of two, and each 4 another.
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
    # Zeros beyond the end of the tensor change neither an amax nor whether it is finite.
    if _BY_HARDWARE:  # one instruction per element
        amax = tl.reduce(tl.abs(tile), 3, _larger, keep_dims=True)
        return _as_pattern(tl.reduce(amax, 1, _larger, keep_dims=True) if SIDE > 1 else amax)
    else:
        amax = tl.max(_as_pattern(tile) & _MAGNITUDE, axis=3, keep_dims=True)
        return tl.max(amax, axis=1, keep_dims=True) if SIDE > 1 else amax


@triton.jit
def factors(tile, tensor_amax, STEPS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the factors of a tile [.., side, runs, run] before and after rounding."""
    if STEPS.scale == "none":
        return 1.0, 1.0
    elif STEPS.scale == "tensor-power":
        amax = _as_pattern(tl.load(tensor_amax))
        scaled = (amax > 0) & (amax < _INFINITY)  # otherwise the scale is 1
        encode, decode = _e8m0(tl.where(scaled, amax, (127 + STEPS.emax) << 23), STEPS.emax, 0)
        return encode, decode if STEPS.alpha else 1.0
    elif STEPS.scale == "tensor":
        amax = _as_pattern(tl.load(tensor_amax))
        encode, decode = _to_top(amax, STEPS.element.top)
        unit = tl.full(decode.shape, 1.0, tl.float32)
        return encode, decode if STEPS.alpha else _nan_unless_finite(amax, unit)
    elif STEPS.scale == "e8m0":
        return _e8m0(_block_amax(tile, STEPS.side), STEPS.emax, STEPS.carry)
    elif STEPS.scale == "fp32":
        return _to_top(_block_amax(tile, STEPS.side), STEPS.element.top)
    elif STEPS.scale == "two-level":
        return _two_level(tile, _as_pattern(tl.load(tensor_amax)), STEPS)
    elif STEPS.scale == "one-level":
        return _one_level(tile, STEPS)
    else:
        return _hif4(_block_amax(tile, STEPS.side), STEPS.scale_element)


# -- a tile, through all of its steps --------------------------------------------------------------


@triton.jit
def quantized(
    tile, draw, tensor_amax, STEPS: tl.constexpr, GIVEN: tl.constexpr = True
) -> tl.tensor:
    """Quantize a float32 tile [rows, columns] of whole blocks along its rows.

    `draw` has the shape of the tile. `tensor_amax` points to the tensor's amax if the scales depend
    on it, else it is None. GIVEN means that it was passed, and may lack a NaN of the tensor.
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
        # These elements have no code for NaN.
        values = tl.where(values == values, values, 0.0)
    rounded = round_to(values, tl.reshape(draw, shape), STEPS.element, STEPS.rounding)
    return tl.reshape(rounded * decode, tile.shape)
