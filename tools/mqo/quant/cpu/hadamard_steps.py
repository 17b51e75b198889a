"""The inner steps of the Hadamard transform, as LLVM IR: signs, butterflies, factor, rounding.

hadamard.py in the folder above defines the transform, and the order of its operations. A vector of
32-bit words holds one register of elements for float32, and two for bfloat16: first those in the
lower halves of the words.
"""

from llvmlite import ir

from mqo.quant.cpu.arithmetic import scalar, to_bf16
from mqo.quant.cpu.lanes import Lanes, load
from mqo.quant.cpu.steps import VECTOR

LINE = VECTOR // 8  # bytes of a vector, and of a cache line
GROUP = 16  # rows whose butterflies fit in registers

_COUNT = VECTOR // 32  # lanes
_ADDRESS = ir.IntType(64)


def line_elements(bits: int) -> int:
    """Return the number of elements of a vector in memory."""
    return VECTOR // bits


def span_of(points: int, bits: int) -> int:
    """Return the number of elements in a row that one `emit_row` handles."""
    return max(points, 2 * line_elements(bits))


def emit_row(builder, target, source, signs, factor, peak, bits, points) -> None:
    """Transform `span_of` consecutive elements; the target may be the source.

    `signs` is the address of a pattern per element, with which it is XORed. The vector at `peak` is
    raised to the largest magnitudes.
    """
    offsets = range(0, span_of(points, bits) * bits // 8, LINE)
    values = []
    for offset in offsets:
        word, flips = (load(builder, _at(builder, a, offset), 32, _COUNT) for a in (source, signs))
        values += _split(word ^ flips, bits)
    for stride in _powers(points):
        values = _butterflies(values, stride, bits)
    _store(builder, [_at(builder, target, o) for o in offsets], values, factor, peak, bits)


def emit_first_rows(builder, target, source, pitch, signs, bits) -> None:
    """Read GROUP rows of one vector, `pitch` bytes apart, and compute the butterflies between them.

    `signs` is the address of a word per row, with which it is XORed. The registers are written to
    `target` one after another.
    """
    rows = []
    for i in range(GROUP):
        word = load(builder, _row(builder, source, pitch, i), 32, _COUNT)
        flip = load(builder, _at(builder, signs, 4 * i), 32, 1).first()
        rows.append(_split(word ^ flip.like(word), bits))
    for part, column in enumerate(zip(*rows, strict=True)):
        values = list(column)
        for distance in _powers(GROUP):
            values = _across(values, distance)
        for i, value in enumerate(values):
            value.store(_at(builder, target, (i * 32 // bits + part) * LINE))


def emit_last_rows(builder, target, source, pitch, factor, peak, bits, points, stream) -> None:
    """Compute the butterflies between one row of each group, round the results, and write them.

    `source` is the address at which `emit_first_rows` wrote that row of the first group; the groups
    follow one another. `pitch` is the distance in bytes between rows of the target; `peak` as in
    `emit_row`. With `stream`, for targets at multiples of LINE, writes bypass the caches.
    """
    parts = 32 // bits
    groups = points // GROUP
    columns = []
    for part in range(parts):
        offsets = [(g * GROUP * parts + part) * LINE for g in range(groups)]
        values = [load(builder, _at(builder, source, offset), 32, _COUNT) for offset in offsets]
        for distance in _powers(groups):
            values = _across(values, distance)
        columns.append(values)
    values = [value for row in zip(*columns, strict=True) for value in row]
    targets = [_row(builder, target, pitch, g * GROUP) for g in range(groups)]
    _store(builder, targets, values, factor, peak, bits, stream)


# -- registers ---------------------------------------------------------------------------------


def _butterflies(values: list[Lanes], stride: int, bits: int) -> list[Lanes]:
    """Compute the butterflies of elements that are `stride` apart in a row."""
    parts = 32 // bits
    if stride < parts:
        return _across(values, stride)
    distance = stride // parts
    if distance < _COUNT:
        return [value.sums_and_differences(distance) for value in values]
    return _across(values, distance // _COUNT * parts)


def _across(values: list[Lanes], distance: int) -> list[Lanes]:
    """Compute the butterflies of registers that are `distance` apart."""
    done = list(values)
    for i, low in enumerate(values):
        if not i & distance:
            high = values[i + distance]
            done[i], done[i + distance] = low.plus(high), low.minus(high)
    return done


def _powers(end: int) -> list[int]:
    """Return the powers of two below `end`, a power of two."""
    return [1 << i for i in range(end.bit_length() - 1)]


def _split(word: Lanes, bits: int) -> list[Lanes]:
    return [word] if bits == 32 else [word << 16, word & 0xFFFF0000]


def _store(builder, targets, values, factor, peak, bits, stream=False) -> None:
    """Multiply registers by the factor, and write one vector to each of `targets`."""
    by = scalar(builder, factor).like(values[0])
    values = [value.times(by) for value in values]
    if bits == 16:
        values = [to_bf16(value) for value in values]
        values = [low >> 16 | high for low, high in zip(values[::2], values[1::2], strict=True)]
    largest = load(builder, peak, bits, VECTOR // bits)
    for value, target in zip(values, targets, strict=True):
        elements = value.cut(bits)
        largest = largest.maximum(elements & elements.constant(2 ** (bits - 1) - 1))
        value.stream(target) if stream else value.store(target)
    largest.store(peak)


# -- addresses ---------------------------------------------------------------------------------


def _at(builder: ir.IRBuilder, start: ir.Value, offset: int) -> ir.Value:
    return builder.add(start, ir.Constant(_ADDRESS, offset))


def _row(builder: ir.IRBuilder, start: ir.Value, pitch: ir.Value, number: int) -> ir.Value:
    return builder.add(start, builder.mul(pitch, ir.Constant(_ADDRESS, number)))
