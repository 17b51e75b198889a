"""Variants of one format look different, and a name looks the same in every picture."""

import itertools

import pytest
from mqo.matrix import tables
from mqo.quant.formats import OWN_COLORS
from mqo.report import colors
from mqo.report.colors import SYMBOLS, look
from mqo.report.looks import PAGES, looks, shaded

from .conftest import contrast

TYPES = {"fprop": "mxfp4", "dgrad": "mxfp4", "wgrad": "mxfp4"}
NAMES = [f"linear_mxfp4, all GEMMs, block {size}" for size in range(20)]


@pytest.mark.parametrize("page", PAGES)
def test_every_lightness_of_every_color_stands_out_from_its_page_and_from_the_others(page):
    own = (color[page] for color in OWN_COLORS)
    for color in (*(getattr(each, page) for each in colors.colors().values()), *own):
        shades = shaded(color, PAGES[page])
        assert shades[0] == color and len(shades) == 3
        assert contrast(color, PAGES[page]) >= 3, color
        assert all(contrast(shade, PAGES[page]) >= 2.99 for shade in shades), color
        assert all(contrast(*pair) > 1.5 for pair in itertools.combinations(shades, 2)), color


def test_a_mode_has_the_color_of_its_format_and_no_marker():
    for mode in tables.modes().values():
        types = mode.types("fprop")
        assert looks([(mode.name, types)]) == [look(types)]
        assert look(types).symbol == SYMBOLS[0]


def test_variants_of_a_format_share_the_dash_and_differ_in_lightness_or_marker():
    chosen = looks([("linear_mxfp4", TYPES), *((name, TYPES) for name in NAMES)])
    assert len(set(chosen)) == 21
    assert {one.dash for one in chosen} == {look(TYPES).dash}
    assert len({one.light for one in chosen}) == len({one.dark for one in chosen}) == 3
    assert len({one.symbol for one in chosen}) > len(SYMBOLS) / 2


def test_the_look_of_a_name_depends_neither_on_order_nor_on_other_formats():
    named = [(name, TYPES) for name in NAMES]
    together = dict(zip(NAMES, looks(named), strict=True))
    assert dict(zip(reversed(NAMES), looks(reversed(named)), strict=True)) == together
    others = [(name, {"fprop": kind}) for name in NAMES for kind in ("nvfp4", "hifp8")]
    assert looks([*others, *named])[len(others) :] == list(together.values())


def test_a_name_keeps_its_look_unless_an_earlier_name_has_the_same():
    alone = [one for name in NAMES for one in looks([(name, TYPES)])]
    together = looks((name, TYPES) for name in NAMES)
    kept = [one == two for one, two in zip(alone, together, strict=True)]
    assert kept[0] and sum(kept) > len(NAMES) / 2
    # `nvfp4 recipe` and `nvfp4 recipe without 2d` are in many pictures.
    pair = [("nvfp4 recipe", TYPES), ("nvfp4 recipe without 2d", TYPES)]
    assert looks(pair) == [one for variant in pair for one in looks([variant])]


def test_more_variants_than_looks_are_drawn_all_the_same():
    assert len(looks((str(n), TYPES) for n in range(60))) == 60
    assert looks([]) == []
