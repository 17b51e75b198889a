"""The inner steps of the Hadamard transform, as LLVM IR: signs, butterflies, factor, rounding.

`hadamard.py` of the folder above defines the transform, and the order of its operations. A vector
of 32-bit words holds one register of elements for float32, and two for bfloat16: those in the lower
halves of the words come first.
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
    """Return how many elements a vector in memory has."""
    return VECTOR // bits


def span_of(points: int, bits: int) -> int:
    """Return how many elements in a row one `emit_row` handles."""
    return max(points, 2 * line_elements(bits))


def emit_row(builder, target, source, signs, factor, peak, bits, points) -> None:
    """Transform `span_of` elements, one behind the other; the target may be the source.

    `signs` is the address of a pattern for each of these elements, to be XORed with it. The vector
    at `peak` becomes as large as the largest magnitudes before they are rounded.
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
    """Read GROUP rows of a vector each, `pitch` bytes apart, and do the butterflies among them.

    `signs` is the address of a word for each row, to be XORed with it. The registers are written
    to `target`, one behind the other.
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
    """Do the butterflies among one row of each group, and write them, rounded.

    `source` is where `emit_first_rows` put that row of the first group; the groups lie one behind
    the other. `pitch` is the way in bytes between rows of the target; `peak` as in `emit_row`.
    `stream` is for targets at multiples of LINE: they are written past the caches.
    """
    parts = 32 // bits
    groups = points // GROUP
    columns = []
    for part in range(parts):
        places = [(g * GROUP * parts + part) * LINE for g in range(groups)]
        values = [load(builder, _at(builder, source, place), 32, _COUNT) for place in places]
        for distance in _powers(groups):
            values = _across(values, distance)
        columns.append(values)
    values = [value for row in zip(*columns, strict=True) for value in row]
    targets = [_row(builder, target, pitch, g * GROUP) for g in range(groups)]
    _store(builder, targets, values, factor, peak, bits, stream)


# -- registers ---------------------------------------------------------------------------------


def _butterflies(values: list[Lanes], stride: int, bits: int) -> list[Lanes]:
    """Do those of elements that are `stride` apart in a row."""
    parts = 32 // bits
    if stride < parts:
        return _across(values, stride)
    distance = stride // parts
    if distance < _COUNT:
        return [value.sums_and_differences(distance) for value in values]
    return _across(values, distance // _COUNT * parts)


def _across(values: list[Lanes], distance: int) -> list[Lanes]:
    """Do those of registers that are `distance` apart."""
    done = list(values)
    for i, low in enumerate(values):
        if not i & distance:
            high = values[i + distance]
            done[i], done[i + distance] = low.plus(high), low.minus(high)
    return done


def _powers(end: int) -> list[int]:
    """Return the powers of two below `end`, which is one."""
    return [1 << i for i in range(end.bit_length() - 1)]


def _split(word: Lanes, bits: int) -> list[Lanes]:
    return [word] if bits == 32 else [word << 16, word & 0xFFFF0000]


def _store(builder, targets, values, factor, peak, bits, stream=False) -> None:
    """Multiply registers, and write them to `targets`, a vector each."""
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
