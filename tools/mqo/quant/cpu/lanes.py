"""Vectors of integers in LLVM IR, with Python's operators, for the inner steps of the kernels.

LLVM does not vectorize some of these loops (such as a maximum over a block, or a result that
overwrites its input); explicit vectors become the vector instructions of the machine.
"""

from __future__ import annotations

from llvmlite import ir

_INDEX = ir.IntType(32)


class Lanes:
    """An integer, or a vector of them, in emitted code; a mask is a vector of bits."""

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

    def __mul__(self, other: Lanes | int) -> Lanes:
        return self._operate("mul", other)

    def __xor__(self, other: Lanes | int) -> Lanes:
        return self._operate("xor", other)

    def __lshift__(self, other: Lanes | int) -> Lanes:
        return self._operate("shl", other)

    def __rshift__(self, other: Lanes | int) -> Lanes:
        """Shift right, filling with zeros."""
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
        """Keep the lanes where `mask` is set, and take `other` elsewhere."""
        return self._new(self.builder.select(mask.value, self.value, self._lift(other)))

    def maximum(self, other: Lanes | int) -> Lanes:
        """Return the larger signed integer of each lane."""
        return self._call("smax", self._lift(other))

    def minimum(self, other: Lanes | int) -> Lanes:
        """Return the smaller signed integer of each lane."""
        return self._call("smin", self._lift(other))

    def absolute(self) -> Lanes:
        """Return the magnitudes of signed integers."""
        return self._call("abs", ir.Constant(ir.IntType(1), 0))

    def largest(self) -> Lanes:
        """Return the largest signed integer of a vector, as a scalar."""
        kind = self.value.type
        name = f"llvm.vector.reduce.smax.{_suffix(kind)}"
        return self._new(call(self.builder, name, kind.element, self.value))

    def like(self, other: Lanes) -> Lanes:
        """Repeat a scalar in a vector of other's type; return the scalar if other is a scalar."""
        kind = other.value.type
        if not isinstance(kind, ir.VectorType):
            return self
        empty = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(empty, self.value, ir.Constant(_INDEX, 0))
        zeros = ir.Constant(ir.VectorType(_INDEX, kind.count), [0] * kind.count)
        return self._new(self.builder.shuffle_vector(first, empty, zeros))

    def swapped(self, distance: int) -> Lanes:
        """Swap lanes that are `distance`, a power of two, apart."""
        return self.ordered([lane ^ distance for lane in range(self.count)])

    def ordered(self, order: list[int], other: Lanes | None = None) -> Lanes:
        """Return a vector of these lanes; those of `other` follow this vector's."""
        mask = ir.Constant(ir.VectorType(_INDEX, len(order)), order)
        second = self.value if other is None else other.value
        return self._new(self.builder.shuffle_vector(self.value, second, mask))

    def cut(self, bits: int) -> Lanes:
        """Return the same vector as integers of `bits` bits."""
        count = self.count * self._width // bits
        return self._new(self.builder.bitcast(self.value, ir.VectorType(ir.IntType(bits), count)))

    def first(self) -> Lanes:
        """Return the first lane, a scalar."""
        return self._new(self.builder.extract_element(self.value, ir.Constant(_INDEX, 0)))

    @property
    def count(self) -> int:
        """The number of lanes."""
        return self.value.type.count

    @property
    def _width(self) -> int:
        return self.value.type.element.width

    @classmethod
    def counting(cls, builder: ir.IRBuilder, start: ir.Value, offsets: list[int]) -> Lanes:
        """Return a vector of `start` plus an offset in each lane."""
        kind = ir.VectorType(start.type, len(offsets))
        steps = Lanes(builder, ir.Constant(kind, offsets))
        return Lanes(builder, start).like(steps) + steps

    def narrowed(self, kind: ir.Type) -> Lanes:
        """Return the low bits of each lane."""
        return self._new(self.builder.trunc(self.value, self._shaped(kind)))

    # -- the patterns as float32, without contraction: results are exactly IEEE's ---------------

    def times(self, other: Lanes) -> Lanes:
        """Multiply."""
        return self._float("fmul", other)

    def plus(self, other: Lanes) -> Lanes:
        """Add."""
        return self._float("fadd", other)

    def over(self, other: Lanes) -> Lanes:
        """Divide."""
        return self._float("fdiv", other)

    def minus(self, other: Lanes) -> Lanes:
        """Subtract."""
        return self._float("fsub", other)

    def sums_and_differences(self, distance: int) -> Lanes:
        """Replace lanes that are `distance`, a power of two, apart by a + b and a - b."""
        kind = self._shaped(ir.FloatType())
        signs = [-1.0 if lane & distance else 1.0 for lane in range(self.count)]
        # b + 1 a and a + (-1) b. The products are exact, so an fma gives the same sum.
        factors = [self.value, ir.Constant(kind, signs), self.swapped(distance).value]
        floats = [self.builder.bitcast(factor, kind) for factor in factors]
        name = f"llvm.fmuladd.{_suffix(kind)}"
        done = call(self.builder, name, kind, *floats)
        return self._new(self.builder.bitcast(done, self.value.type))

    def round_off(self, addend: Lanes) -> Lanes:
        """Return (self + addend) - addend."""
        return self._float("fadd", addend).minus(addend)

    def whole(self) -> Lanes:
        """Round nonnegative numbers down to integers."""
        floats = self.builder.bitcast(self.value, self._shaped(ir.FloatType()))
        return self._new(self.builder.fptosi(floats, self.value.type))

    def float(self) -> Lanes:
        """Convert integers to float32."""
        floats = self.builder.sitofp(self.value, self._shaped(ir.FloatType()))
        return self._new(self.builder.bitcast(floats, self.value.type))

    def constant(self, value: int) -> Lanes:
        """Return a vector of this type with `value` everywhere."""
        return self._new(self._lift(value))

    def listed(self, values: list[int]) -> Lanes:
        """Return a vector of this type with these values."""
        return self._new(ir.Constant(self.value.type, values))

    def store(self, address: ir.Value) -> None:
        """Write to an address, an int64 of any alignment."""
        pointer = self.builder.inttoptr(address, self.value.type.as_pointer())
        self.builder.store(self.value, pointer, align=1)

    def stream(self, address: ir.Value) -> None:
        """Write, bypassing the caches, to an int64 address at a multiple of the vector size."""
        pointer = self.builder.inttoptr(address, self.value.type.as_pointer())
        store = self.builder.store(self.value, pointer, align=self.count * self._width // 8)
        metadata = ir.Constant(_INDEX, 1)
        store.set_metadata("nontemporal", self.builder.module.add_metadata([metadata]))

    def _shaped(self, kind: ir.Type) -> ir.Type:
        """Return `kind`, or a vector of it if this is a vector."""
        vector = isinstance(self.value.type, ir.VectorType)
        return ir.VectorType(kind, self.count) if vector else kind

    def _float(self, name: str, other: Lanes) -> Lanes:
        kind = self._shaped(ir.FloatType())
        both = [self.builder.bitcast(lanes.value, kind) for lanes in (self, other)]
        return self._new(self.builder.bitcast(getattr(self.builder, name)(*both), self.value.type))

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
        name = f"llvm.{name}.{_suffix(kind)}"
        return self._new(call(self.builder, name, kind, self.value, argument))


def load(builder: ir.IRBuilder, address: ir.Value, bits: int, count: int) -> Lanes:
    """Read a vector of `count` integers of `bits` bits, of any alignment."""
    kind = ir.VectorType(ir.IntType(bits), count)
    return Lanes(builder, builder.load(builder.inttoptr(address, kind.as_pointer()), align=1))


def _suffix(kind: ir.Type) -> str:
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{_suffix(kind.element)}"
    return "f32" if isinstance(kind, ir.FloatType) else f"i{kind.width}"


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    """Call an intrinsic of LLVM."""
    kinds = [argument.type for argument in arguments]
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, kinds), name)
    return builder.call(function, arguments)
