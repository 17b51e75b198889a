"""Read formats.toml: the number formats, the GEMM sites, and the choices that a quantizer takes.

This module imports only the standard library, because commands do not load torch.
"""

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqo.quant.plugins import PLUGINS, Plugin, note_registration

NONE = "none"

# E8M0, the shared scale of an MX block: a byte b is 2^(b - 127), 2^-127 .. 2^127; 255 is NaN.
SCALE_EXPONENT_MIN = -127
SCALE_EXPONENT_MAX = 127
SCALE_BIAS = 127
SCALE_EXPONENT_NAN = 128


@dataclass(frozen=True)
class Minifloat:
    """A minifloat, such as the element formats of OCP Microscaling (MX) v1.0, section 5.3.

    A normal value is ±2^e (1 + M / 2^mantissa_bits) with emin <= e <= emax. Subnormals continue
    below 2^emin in steps of 2^(emin - mantissa_bits). A code is sign, exponent, mantissa; those
    beyond `max_value` are NaN, and the first of them Infinity where `has_infinity`. Without
    `signed`, a code has no sign.

    Integers are minifloats whose exponent is always 0: multiples of 2^-mantissa_bits below 2. With
    `complement`, a code is the two's complement of the integer, and a zero has no sign.
    """

    name: str
    bits: int
    emax: int
    emin: int
    mantissa_bits: int
    max_value: float
    has_infinity: bool = False
    complement: bool = False
    signed: bool = True

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest positive value."""
        return self.emin - self.mantissa_bits

    @classmethod
    def integer(cls, name: str, bits: int, signs: str) -> "Minifloat":
        """Derive the constants of an integer's row; raise ValueError as `from_row`."""
        check_choice(f"signs of {name}", signs, ("magnitude", "complement"))
        check_choice(f"bits of {name}", bits, range(3, 9))
        fraction = bits - 2
        top = 2.0 - 2.0**-fraction
        return cls(name, bits, 0, 0, fraction, top, complement=signs == "complement")

    @classmethod
    def from_row(
        cls, name: str, bits: int, mantissa_bits: int, special: str = NONE, signed: bool = True
    ) -> "Minifloat":
        """Derive the constants of a row; raise ValueError if the kernels do not support it."""
        check_choice(f"special codes of {name}", special, (NONE, "nan", "ieee"))
        exponent_bits = bits - signed - mantissa_bits
        # A code is a byte; ties to even need a mantissa; bfloat16 has every value.
        check_choice(f"bits of {name}", bits, range(3, 9))
        check_choice(f"mantissa bits of {name}", mantissa_bits, range(1, bits - 1))
        check_choice(f"exponent bits of {name}", exponent_bits, range(1, 6))
        ieee = special == "ieee"
        bias = 2 ** (exponent_bits - 1) - 1
        emax = 2**exponent_bits - 1 - bias - ieee
        steps = 2 ** (mantissa_bits + 1) - 1 - (special == "nan")
        top = steps * 2.0 ** (emax - mantissa_bits)
        return cls(name, bits, emax, 1 - bias, mantissa_bits, top, ieee, signed=signed)


@dataclass(frozen=True)
class TaperedFormat:
    """An element whose mantissa narrows as the exponent grows, such as HiFloat8's.

    `widths` lists (largest |exponent|, mantissa bits), widest mantissa first. Below the last one,
    only powers of two are representable, down to 2^min_exponent. Infinity has the code of the first
    value above 2^max_exponent, so a value overflows if it rounds to that value.
    """

    name: str
    bits: int
    widths: tuple[tuple[int, int], ...]
    min_exponent: int
    max_exponent: int

    @property
    def max_value(self) -> float:
        """The largest finite value."""
        return 2.0**self.max_exponent


def minifloat(element: Minifloat | TaperedFormat) -> Minifloat:
    """Return an element that is a minifloat."""
    assert isinstance(element, Minifloat), f"{element.name} is tapered"
    return element


@dataclass(frozen=True)
class Format:
    """A row of formats.toml, which says what each field means."""

    name: str
    element: Minifloat | TaperedFormat
    scale: str
    source: str
    color: str
    light: str
    dark: str
    rounding: str = "nearest-even"
    block: int | None = None
    block_scale: Minifloat | None = None
    square: bool = False
    scripts: bool = False
    least_sqnr: float | None = None
    sqnr_reason: str = ""

    @property
    def minifloat(self) -> Minifloat:
        """The element, which is a minifloat."""
        return minifloat(self.element)

    @property
    def tapered(self) -> TaperedFormat:
        """The element, which is tapered."""
        assert isinstance(self.element, TaperedFormat), f"{self.element.name} is not tapered"
        return self.element

    @property
    def is_mx(self) -> bool:
        """Whether it is an MX format of OCP, with a choice of block and scale rule."""
        return self.scale == "e8m0"

    @property
    def scale_rules(self) -> tuple[str, ...]:
        """The rules by which a scale may follow from a block, the default first; () for one."""
        return SCALE_RULES_OF.get(self.scale, ())

    @property
    def needs_tensor_amax(self) -> bool:
        """Whether its scales depend on the amax of the tensor."""
        return self.scale in ("tensor", "two-level")

    @property
    def code_bits(self) -> int:
        """Bits that a code takes in a packed tensor: 4, 6 or 8."""
        return next(bits for bits in (4, 6, 8) if bits >= self.element.bits)

    @property
    def packed_bytes(self) -> float:
        """Bytes of a packed element, with its share of a block's scale."""
        return self.code_bits / 8 + (SCALE_BYTES[self.scale] / self.block if self.block else 0)


@dataclass(frozen=True)
class Family:
    """A type of a site whose operands have different formats; None: quant.toml has them."""

    name: str
    gradients: str | None = None
    others: str | None = None


@dataclass(frozen=True)
class GemmSite:
    """One GEMM of the model: the names of its two operands and their contraction axes.

    `layer` is the kind of layer that it belongs to, LINEAR or ATTENTION. `backward_of` is the site
    whose gradients it belongs to, for the products of attention's backward pass; else ''.
    """

    name: str
    layer: str
    lhs: str
    lhs_axis: int
    rhs: str
    rhs_axis: int
    backward_of: str = ""

    def operand(self, side: str) -> tuple[str, int]:
        """Return the name and the contraction axis of an operand, "lhs" or "rhs"."""
        return (self.lhs, self.lhs_axis) if side == "lhs" else (self.rhs, self.rhs_axis)

    @property
    def computed_again(self) -> str:
        """The site of the forward pass whose product this one computes again, or this site."""
        first = SITES[self.backward_of or self.name]
        sides = ("lhs", "rhs")
        is_same = all(first.operand(side) == self.operand(side) for side in sides)
        return first.name if is_same else self.name


LINEAR, ATTENTION = "linear", "attention"


def check_choice(name: str, value: object, valid: Sequence[object]) -> None:
    """Raise ValueError, naming the valid choices, unless `value` is one of `valid`."""
    # 32.0 == 32 in Python, but a float is not a block size: the type must match, too.
    if not any(value == choice and isinstance(value, type(choice)) for choice in valid):
        raise ValueError(f"unknown {name} {value!r}; valid: {', '.join(map(str, valid))}")


def types() -> tuple[str, ...]:
    """Return the types of a site: formats, families, 'none', and the custom quantizers."""
    return (NONE, *FORMATS, *FAMILIES, *PLUGINS)


def source_types() -> tuple[str, ...]:
    """Return the values that a `custom_quant_type` literal in the source may hold.

    A custom quantizer is one only in the source of a run.
    """
    return (NONE, *FORMATS, *FAMILIES)


def tensor_types() -> tuple[str, ...]:
    """Return the types of a tensor: formats, 'none', and the custom quantizers."""
    return (NONE, *FORMATS, *PLUGINS)


def format_of(name: str) -> "Format | Plugin":
    """Return the format, or the custom quantizer, with that name; KeyError for 'none'."""
    return PLUGINS[name] if name in PLUGINS else FORMATS[name]


def register_format(row: Format) -> None:
    """Make a format of a user a type (own_formats.py)."""
    note_registration()
    FORMATS[row.name] = row


def chosen_types(types: Mapping[str, str]) -> dict[str, str]:
    """Return {site: type} in the order of SITES, as runs record it.

    Products of attention's backward pass without a type are left out.
    """
    return {
        site: types[site]
        for site in SITES
        if site in types and (types[site] != NONE or site not in ATTENTION_BACKWARD)
    }


def check_type(name: object) -> None:
    """Raise ValueError, naming the valid types, unless `name` is one of `types`."""
    check_choice("quant type", name, types())


def check_seed(seed: object) -> None:
    """Raise ValueError unless `seed` is an unsigned integer of 64 bits."""
    # bool is a subclass of int, but `true` is not a seed.
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise ValueError(f"invalid seed {seed!r}; valid: integers from 0 to 2^64 - 1")


# -- the file -------------------------------------------------------------------------------------


def element_of(name: str, row: dict[str, Any]) -> Minifloat | TaperedFormat:
    """Return the element of a row; ValueError or TypeError for an invalid one."""
    if "signs" in row:
        return Minifloat.integer(name, **row)
    if "widths" not in row:
        return Minifloat.from_row(name, **row)
    return TaperedFormat(name, **row | {"widths": tuple(map(tuple, row["widths"]))})


def format_of_row(
    name: str, row: dict[str, Any], known: Mapping[str, Minifloat | TaperedFormat]
) -> Format:
    """Return the format of a row whose elements are among `known`; ValueError if it is invalid."""
    signed = tuple(each for each, kind in known.items() if getattr(kind, "signed", True))
    check_choice(f"element of {name}", row["element"], signed)
    scale_element = row.get("block_scale")
    choices = tuple(known) if row["scale"] in ("one-level", "two-level") else (None,)
    check_choice(f"block scale of {name}", scale_element, choices)
    elements = {"element": known[row["element"]], "block_scale": known.get(str(scale_element))}
    result = Format(name, **row | elements)
    tapered = isinstance(result.element, TaperedFormat)
    scales = (NONE,) if tapered else tuple(kind for kind in SCALE_BYTES if kind != NONE)
    check_choice(f"scale of {name}", result.scale, scales)
    blocks = (None,) if result.scale in (NONE, "tensor") else BLOCK_SIZES
    check_choice(f"block of {name}", result.block, blocks)
    check_choice(f"rounding of {name}", result.rounding, ROUNDINGS)
    return result


def site_of(name: str, row: dict[str, Any]) -> GemmSite:
    """Return the site of a row."""
    lhs, lhs_axis = row["lhs"]
    rhs, rhs_axis = row["rhs"]
    backward_of = row.get("backward_of", "")
    return GemmSite(name, row["layer"], lhs, lhs_axis, rhs, rhs_axis, backward_of)


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
BLOCK_SIZES: tuple[int, ...] = tuple(_FILE["block_sizes"])
SCALE_RULES_OF = {kind: tuple(rules) for kind, rules in _FILE["scale_rules"].items()}
SCALE_RULES: tuple[str, ...] = tuple(itertools.chain(*SCALE_RULES_OF.values()))
ROUNDINGS: tuple[str, ...] = tuple(_FILE["roundings"])
OVERFLOWS: tuple[str, ...] = tuple(_FILE["overflows"])
SAVED_FORMS: tuple[str, ...] = tuple(_FILE["saved_forms"])
TILES: tuple[str, ...] = tuple(_FILE["tiles"])
HADAMARD_POINTS: tuple[int, ...] = tuple(_FILE["hadamard_points"])
HADAMARD_SIGNS: tuple[str, ...] = tuple(_FILE["hadamard_signs"])
OWN_COLORS: tuple[dict[str, str], ...] = tuple(_FILE["own_colors"])
SCALE_BYTES: dict[str, int] = _FILE["scale_bytes"]
ELEMENTS = {name: element_of(name, row) for name, row in _FILE["elements"].items()}
FORMATS = {name: format_of_row(name, row, ELEMENTS) for name, row in _FILE["formats"].items()}
FAMILIES = {name: Family(name, **row) for name, row in _FILE["families"].items()}
SITES = {name: site_of(name, row) for name, row in _FILE["sites"].items()}
ATTENTION_BACKWARD = tuple(name for name, site in SITES.items() if site.backward_of)

# What `source_types` and `tensor_types` return without the formats and quantizers of a user.
QUANT_TYPES = (NONE, *FORMATS, *FAMILIES)
REFERENCE_TYPES = (NONE, *FORMATS)
