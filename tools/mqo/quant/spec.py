"""The specification of a quantization: a validated, hashable value for all implementations."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mqo.quant.formats import (
    BLOCK_SIZES,
    FORMATS,
    HADAMARD_POINTS,
    HADAMARD_SIGNS,
    NONE,
    OVERFLOWS,
    ROUNDINGS,
    SCALE_RULES,
    TILES,
    Format,
    TaperedFormat,
    check_choice,
    format_of,
    tensor_types,
)
from mqo.quant.plugins import PLUGINS, Plugin


@dataclass(frozen=True)
class QuantSpec:
    """A format and its choices; docs/formats.md defines them.

    Attributes:
        quant_type: a format, 'none', or the name of a custom quantizer.
        block: number of elements that share a scale, one of BLOCK_SIZES; the last block may be
            short. Only mx formats have a choice. None becomes the format's size, or stays None if
            the format has no blocks.
        scale_rule: rule by which the scale of a block follows from it, one of SCALE_RULES. Mx
            formats and those with two-level scales have a choice.
        rounding: one of ROUNDINGS; None becomes the format's default.
        overflow: the result of hifp8 for a value that rounds beyond 32768: 'saturate' gives ±32768,
            'inf' gives ±Inf. Mx elements always saturate.
        tensor_scale: whether hifp8 first divides the tensor by a power of two computed from its
            amax. The other formats have their own scales.
        without_alpha: whether quantized values exclude alpha, the scale of the tensor, so that it
            can be applied to the product of a GEMM before that is rounded (products.py).
        tile: 'row' for blocks along one axis; 'square' for squares of that side, if the format
            supports them: they are the same along both axes of a matrix.
        options: {option: value} of a custom quantizer, which become pairs with its defaults.

    A choice that the format does not use is checked and set to its default, since a run may
    quantize to several formats: specs with the same rounding are equal. Raise ValueError, naming
    the valid choices, for an unknown one.

    Examples:
        >>> spec = QuantSpec("mxfp4", rounding="stochastic")
        >>> spec.block, spec.scale_rule
        (32, 'floor')
    """

    quant_type: str
    block: int | None = None
    scale_rule: str = "floor"
    rounding: str | None = None
    overflow: str = "saturate"
    tensor_scale: bool = False
    tile: str = "row"
    without_alpha: bool = False
    options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        check_choice("quant type", self.quant_type, tensor_types())
        if self.block is not None:
            check_choice("block size", self.block, BLOCK_SIZES)
        check_choice("scale rule", self.scale_rule, SCALE_RULES)
        if self.rounding is not None:
            check_choice("rounding", self.rounding, ROUNDINGS)
        check_choice("overflow", self.overflow, OVERFLOWS)
        check_choice("tensor scale", self.tensor_scale, (False, True))
        check_choice("tile", self.tile, TILES)
        check_choice("without alpha", self.without_alpha, (False, True))
        own = format_of(self.quant_type) if self.quant_type != NONE else None
        is_mx = own is not None and own.is_mx
        is_tapered = isinstance(own, Format) and isinstance(own.element, TaperedFormat)
        rules = (own.scale_rules if own else ()) or SCALE_RULES[:1]
        rounding = self.rounding if isinstance(own, Format) else None
        read = {
            "block": (is_mx and self.block) or (own.block if own else None),
            "scale_rule": self.scale_rule if self.scale_rule in rules else rules[0],
            "rounding": rounding or (own.rounding if own else ROUNDINGS[0]),
            "overflow": self.overflow if is_tapered else OVERFLOWS[0],
            "tensor_scale": self.tensor_scale and is_tapered,
            "tile": self.tile if own and own.square else TILES[0],
            "options": self._all_options(own),
        }
        for name, value in read.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "without_alpha", self.without_alpha and self.scales_by_tensor)

    def _all_options(self, own: Format | Plugin | None) -> tuple[tuple[str, Any], ...]:
        chosen = dict(self.options)
        if isinstance(own, Plugin):
            return tuple(own.with_defaults(chosen).items())
        if chosen:
            raise ValueError(f"{self.quant_type} has no options; valid: those of a quantizer")
        return ()

    @property
    def format(self) -> Format:
        """The row of the format; KeyError for other types."""
        return FORMATS[self.quant_type]

    @property
    def plugin(self) -> Plugin | None:
        """The custom quantizer with this name; None for a format."""
        return PLUGINS.get(self.quant_type)

    @property
    def changed_options(self) -> dict[str, Any]:
        """The options of a custom quantizer that differ from its defaults."""
        defaults = self.plugin.options if self.plugin else {}
        return {
            name: value for name, value in dict(self.options).items() if value != defaults[name]
        }

    @property
    def rounding_mode(self) -> str:
        """The rounding, never None after initialization."""
        assert self.rounding is not None
        return self.rounding

    @property
    def block_size(self) -> int:
        """The block size of a format with blocks."""
        assert self.block is not None, f"{self.quant_type} has no blocks"
        return self.block

    @property
    def tile_text(self) -> str:
        """The tile that shares a scale: '1x32', '16x16', or 'tensor' without blocks.

        It is 'own' for a custom quantizer without blocks, which may scale what it wants.
        """
        if self.block is None:
            return "own" if self.plugin else "tensor"
        return f"{self.block if self.tile == 'square' else 1}x{self.block}"

    @property
    def rule_text(self) -> str:
        """The scale rule of an mx format, or one that is not the default, else ''."""
        own = format_of(self.quant_type) if self.quant_type != NONE else None
        if own is None or not own.scale_rules:
            return ""
        return self.scale_rule if own.is_mx or self.scale_rule != own.scale_rules[0] else ""

    @property
    def four_over_six(self) -> str | None:
        """The error, 'mse' or 'mae', by which blocks choose their scale; None if they do not."""
        prefix = "four-over-six-"
        return self.scale_rule.removeprefix(prefix) if self.scale_rule.startswith(prefix) else None

    @property
    def needs_tensor_amax(self) -> bool:
        """Whether the scales depend on the amax of the full tensor, across ranks."""
        return self.quant_type != NONE and format_of(self.quant_type).needs_tensor_amax

    @property
    def scales_by_tensor(self) -> bool:
        """Whether the scales depend on the amax of a tensor; with `tensor_scale`, on one rank."""
        return self.needs_tensor_amax or self.tensor_scale


@functools.cache
def without_alpha(spec: QuantSpec) -> QuantSpec:
    """Return the spec whose quantized values exclude alpha, if the format has one."""
    return replace(spec, without_alpha=True)


@dataclass(frozen=True)
class Hadamard:
    """A transform of blocks of `points` elements along the contraction axis; see hadamard.py.

    points: one of HADAMARD_POINTS. signs: the factors of the elements before the transform: 'fixed'
    for the 16 published ones, repeated; 'random', from a seed; or 'none'. Raise ValueError, naming
    the valid choices, for an unknown one.

    Examples:
        >>> OperandSpec(QuantSpec("nvfp4"), hadamard=Hadamard(16, signs="random")).is_plain
        False
    """

    points: int
    signs: str = "fixed"

    def __post_init__(self) -> None:
        check_choice("Hadamard size", self.points, HADAMARD_POINTS)
        check_choice("Hadamard signs", self.signs, HADAMARD_SIGNS)


@dataclass(frozen=True)
class OperandSpec:
    """The quantization of a GEMM operand: multiply by `gain`, transform, and round by `spec`.

    Apart from rounding, the product of both operands equals the unquantized product: the rounded
    operand is divided by the gain, and the other operand has the same transform. With `smooth`, the
    mean along axis 0 is subtracted and not added back. For keys this shifts each row of scores by a
    constant, which does not change the softmax. `source` is 'fprop' if the values to which the
    forward pass rounded the operand take its place; type 'none' does not round them again.

    Examples:
        >>> operand = OperandSpec(QuantSpec("mxfp4"), hadamard=Hadamard(32), gain=0.75)
        >>> operand.is_plain, operand.is_quantized
        (False, True)
    """

    spec: QuantSpec
    hadamard: Hadamard | None = None
    gain: float = 1.0
    smooth: bool = False
    source: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the operand has no gain, transform or smoothing."""
        return self.hadamard is None and self.gain == 1.0 and not self.smooth

    @property
    def is_quantized(self) -> bool:
        """Whether the operand has a type of its own."""
        return self.spec.quant_type != NONE

    @property
    def is_only_source(self) -> bool:
        """Whether the operand is its source, unchanged."""
        return self.source is not None and self.is_plain and not self.is_quantized

    @property
    def changes(self) -> bool:
        """Whether the values for the GEMM differ from the operand's."""
        return self.is_quantized or self.hadamard is not None or self.source is not None

    @property
    def rounds_by_block(self) -> bool:
        """Whether only the block of an element, and the tensor's amax, determine its rounding.

        The block is that of a scale or of a transform.
        """
        is_plain = self.gain == 1.0 and not self.smooth
        is_alone = is_plain and self.source is None and self.spec.plugin is None
        by_place = self.spec.rounding == "stochastic" or self.spec.tile == "square"
        return self.is_quantized and is_alone and not by_place

    @property
    def longest_block(self) -> int:
        """The number of elements along the contraction axis that depend on one another, or 0."""
        return max(self.spec.block or 0, self.hadamard.points if self.hadamard else 0)

    @property
    def multiple(self) -> int:
        """What must divide K, the elements that the GEMM sums over."""
        return self.spec.plugin.multiple_after(self._points) if self.spec.plugin else 1

    def size_fault(self, size: int) -> str:
        """Return why K = `size` elements are refused, or ''."""
        plugin = self.spec.plugin
        return plugin.size_fault(size, self._points) if plugin else ""

    @property
    def _points(self) -> int:
        return self.hadamard.points if self.hadamard else 1

    @property
    def is_same_along_all_axes(self) -> bool:
        """Whether a quantized matrix has the same values for any contraction axis."""
        if self.hadamard or self.spec.rounding == "stochastic":
            return False
        square = self.spec.tile == "square"
        return self.spec.quant_type == NONE or square or not (self.spec.block or self.spec.plugin)
