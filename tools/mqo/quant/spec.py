"""How a tensor is quantized: one validated, hashable value that every implementation takes."""

from dataclasses import dataclass

from mqo.quant.formats import (
    BLOCK_SIZES,
    FORMATS,
    HADAMARD_POINTS,
    HADAMARD_SIGNS,
    NONE,
    OVERFLOWS,
    REFERENCE_TYPES,
    ROUNDINGS,
    SCALE_RULES,
    TILES,
    Format,
    TaperedFormat,
    check_choice,
)


@dataclass(frozen=True)
class QuantSpec:
    """A format and its choices; docs/formats.md defines what each means.

    Attributes:
        quant_type: one of REFERENCE_TYPES.
        block: elements that share one scale, one of BLOCK_SIZES; the last block may be short. It is
            a choice for mx formats; the others have one size. None becomes the format's own size,
            or stays None if the format has no blocks.
        scale_rule: how the mx scale follows from a block's amax, one of SCALE_RULES.
        rounding: one of ROUNDINGS; None becomes the format's own.
        overflow: the result of hifp8 for a value that rounds beyond 32768: 'saturate' gives ±32768,
            'inf' gives ±Inf. Mx elements always saturate.
        tensor_scale: whether hifp8 first divides the tensor by a power of two that follows from its
            amax. The other formats have scales of their own.
        tile: 'row' for blocks along one axis; 'square' for squares of that side, where the format
            has them: a matrix has the same ones along both axes.

    A choice that the format does not read is checked and set to its default, since one run may
    quantize to several formats: specs that round alike are equal. Raises ValueError, naming the
    valid ones, for an unknown choice.
    """

    quant_type: str
    block: int | None = None
    scale_rule: str = "floor"
    rounding: str | None = None
    overflow: str = "saturate"
    tensor_scale: bool = False
    tile: str = "row"

    def __post_init__(self) -> None:
        check_choice("quant type", self.quant_type, REFERENCE_TYPES)
        if self.block is not None:
            check_choice("block size", self.block, BLOCK_SIZES)
        check_choice("scale rule", self.scale_rule, SCALE_RULES)
        if self.rounding is not None:
            check_choice("rounding", self.rounding, ROUNDINGS)
        check_choice("overflow", self.overflow, OVERFLOWS)
        check_choice("tensor scale", self.tensor_scale, (False, True))
        check_choice("tile", self.tile, TILES)
        own = FORMATS.get(self.quant_type)
        is_mx = own is not None and own.is_mx
        is_tapered = own is not None and isinstance(own.element, TaperedFormat)
        read = {
            "block": (is_mx and self.block) or (own.block if own else None),
            "scale_rule": self.scale_rule if is_mx else SCALE_RULES[0],
            "rounding": (own and self.rounding) or (own.rounding if own else ROUNDINGS[0]),
            "overflow": self.overflow if is_tapered else OVERFLOWS[0],
            "tensor_scale": self.tensor_scale and is_tapered,
            "tile": self.tile if own and own.square else TILES[0],
        }
        for name, value in read.items():
            object.__setattr__(self, name, value)

    @property
    def format(self) -> Format:
        """The format's row; KeyError for 'none'."""
        return FORMATS[self.quant_type]

    @property
    def rounding_mode(self) -> str:
        """The rounding, which is a name once the spec is made."""
        assert self.rounding is not None
        return self.rounding

    @property
    def block_size(self) -> int:
        """The block, of a format that has blocks."""
        assert self.block is not None, f"{self.quant_type} has no blocks"
        return self.block

    @property
    def tile_text(self) -> str:
        """Return the elements that share a scale: '1x32', '16x16', or 'tensor' without blocks."""
        if self.block is None:
            return "tensor"
        return f"{self.block if self.tile == 'square' else 1}x{self.block}"

    @property
    def needs_tensor_amax(self) -> bool:
        """Whether its scales follow from the largest magnitude of the tensor, on all its ranks."""
        return self.quant_type != NONE and self.format.needs_tensor_amax

    @property
    def scales_by_tensor(self) -> bool:
        """Whether its scales follow from that magnitude: with `tensor_scale` hifp8's, of a rank."""
        return self.needs_tensor_amax or self.tensor_scale


@dataclass(frozen=True)
class Hadamard:
    """A transform of blocks of `points` elements along the contraction axis; hadamard.py does it.

    points: one of HADAMARD_POINTS. signs: what the elements are multiplied by first: 'fixed', the
    16 published ones, repeated; 'random', from a seed; 'none'. Raises ValueError, naming the valid
    ones, for an unknown choice.
    """

    points: int
    signs: str = "fixed"

    def __post_init__(self) -> None:
        check_choice("Hadamard size", self.points, HADAMARD_POINTS)
        check_choice("Hadamard signs", self.signs, HADAMARD_SIGNS)


@dataclass(frozen=True)
class OperandSpec:
    """How an operand of a GEMM is quantized: multiplied by `gain`, transformed, rounded by `spec`.

    Apart from rounding, the product of both operands equals that of the unquantized ones: the
    rounded operand is divided by the gain, and the other operand has the same transform. With
    `smooth`, the mean along axis 0 is subtracted and not added back. For keys this shifts each row
    of scores by a constant, which does not change the softmax.
    """

    spec: QuantSpec
    hadamard: Hadamard | None = None
    gain: float = 1.0
    smooth: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the operand itself is rounded, without gain, transform and smoothing."""
        return self.hadamard is None and self.gain == 1.0 and not self.smooth

    @property
    def longest_block(self) -> int:
        """The number of elements along the contraction axis that are quantized together, or 0."""
        return max(self.spec.block or 0, self.hadamard.points if self.hadamard else 0)

    @property
    def is_same_along_all_axes(self) -> bool:
        """Whether a matrix has the same values whichever axis is the contraction axis."""
        if self.hadamard or self.spec.rounding == "stochastic":
            return False
        return self.spec.quant_type == NONE or not self.spec.block or self.spec.tile == "square"
