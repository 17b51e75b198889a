"""Vectors of integers in LLVM IR, with Python's operators: what the kernels' inner steps emit.

LLVM's vectorizer gives up on some of these loops (a maximum over a block comes out scalar, and a
result in the place of its input runs one by one); vectors written as such become whatever vector
instructions the machine has.
"""

from __future__ import annotations

from llvmlite import ir

_INDEX = ir.IntType(32)


class Lanes:
    """An integer, or a vector of them, that code in the making computes; a mask is one of bits."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder = builder
        self.value = value

    def __and__(self, other: Lanes | int) -> Lanes:
        return self._operate("and_", other)

    def __or__(self, other: Lanes | int) -> Lanes:
        return self._operate("or_", other)

    def __add__(self, other: Lanes | int) -> Lanes:
        return self._operate("add", other)

    def __sub__(self, other: Lanes | int) -> Lanes:
        return self._operate("sub", other)

    def __lshift__(self, other: Lanes | int) -> Lanes:
        return self._operate("shl", other)

    def __rshift__(self, other: Lanes | int) -> Lanes:
        """Shift right; zeros come in."""
        return self._operate("lshr", other)

    def __lt__(self, other: Lanes | int) -> Lanes:
        """Compare as signed integers, to a mask."""
        return self._compare("<", other)

    def __gt__(self, other: Lanes | int) -> Lanes:
        """Compare as signed integers, to a mask."""
        return self._compare(">", other)

    def equals(self, other: Lanes | int) -> Lanes:
        """Compare, to a mask."""
        return self._compare("==", other)

    def where(self, mask: Lanes, other: Lanes | int) -> Lanes:
        """Keep these where `mask` is set, and take `other` elsewhere."""
        return self._new(self.builder.select(mask.value, self.value, self._lift(other)))

    def maximum(self, other: Lanes | int) -> Lanes:
        """Return the larger of each two signed integers."""
        return self._call("smax", self._lift(other))

    def minimum(self, other: Lanes | int) -> Lanes:
        """Return the smaller of each two signed integers."""
        return self._call("smin", self._lift(other))

    def absolute(self) -> Lanes:
        """Return the magnitudes of signed integers."""
        return self._call("abs", ir.Constant(ir.IntType(1), 0))

    def leading_zeros(self) -> Lanes:
        """Count them; all bits for 0."""
        return self._call("ctlz", ir.Constant(ir.IntType(1), 0))

    def largest(self) -> Lanes:
        """Return the largest signed integer of a vector, as a scalar."""
        kind = self.value.type
        name = f"llvm.vector.reduce.smax.{_suffix(kind)}"
        return self._new(_call(self.builder, name, kind.element, [self.value]))

    def spread_like(self, other: Lanes) -> Lanes:
        """Repeat a scalar in a vector of other's type."""
        kind = other.value.type
        empty = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(empty, self.value, ir.Constant(_INDEX, 0))
        zeros = ir.Constant(ir.VectorType(_INDEX, kind.count), [0] * kind.count)
        return self._new(self.builder.shuffle_vector(first, empty, zeros))

    def round_off(self, addend: Lanes) -> Lanes:
        """Read both as float32, and return (self + addend) - addend."""
        floats = ir.VectorType(ir.FloatType(), self.value.type.count)
        value, other = (self.builder.bitcast(v, floats) for v in (self.value, addend.value))
        rounded = self.builder.fsub(self.builder.fadd(value, other), other)
        return self._new(self.builder.bitcast(rounded, self.value.type))

    def constant(self, value: int) -> Lanes:
        """Return a vector of this type with `value` everywhere."""
        return self._new(self._lift(value))

    def store(self, address: ir.Value) -> None:
        """Write to an address, an int64, whatever its alignment."""
        pointer = self.builder.inttoptr(address, self.value.type.as_pointer())
        self.builder.store(self.value, pointer, align=1)

    def _new(self, value: ir.Value) -> Lanes:
        return Lanes(self.builder, value)

    def _lift(self, other: Lanes | int) -> ir.Value:
        if isinstance(other, Lanes):
            return other.value
        kind = self.value.type
        return ir.Constant(kind, [other] * kind.count if isinstance(kind, ir.VectorType) else other)

    def _operate(self, name: str, other: Lanes | int) -> Lanes:
        return self._new(getattr(self.builder, name)(self.value, self._lift(other)))

    def _compare(self, operator: str, other: Lanes | int) -> Lanes:
        return self._new(self.builder.icmp_signed(operator, self.value, self._lift(other)))

    def _call(self, name: str, argument: ir.Value) -> Lanes:
        kind = self.value.type
        arguments = [self.value, argument]
        return self._new(_call(self.builder, f"llvm.{name}.{_suffix(kind)}", kind, arguments))


def load(builder: ir.IRBuilder, address: ir.Value, bits: int, count: int) -> Lanes:
    """Read a vector of `count` integers of `bits` bits, whatever its alignment."""
    kind = ir.VectorType(ir.IntType(bits), count)
    return Lanes(builder, builder.load(builder.inttoptr(address, kind.as_pointer()), align=1))


def _suffix(kind: ir.Type) -> str:
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}i{kind.element.width}"
    return f"i{kind.width}"


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, arguments: list[ir.Value]) -> ir.Value:
    kinds = [argument.type for argument in arguments]
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, kinds), name)
    return builder.call(function, arguments)
