"""Colors that can be told from the page, and looks that are the modes' own."""

from types import SimpleNamespace

import pytest
from mqo.matrix import tables
from mqo.quant.formats import OWN_COLORS
from mqo.report import colors
from mqo.report.colors import look


def all_colors():
    """Those of families, and those for formats of a user."""
    return [*colors.colors().values(), *(SimpleNamespace(**c) for c in OWN_COLORS)]


@pytest.mark.parametrize("part", ["light", "dark"])
def test_no_two_formats_share_a_color_or_its_name(part):
    named = [getattr(each, part) for each in all_colors()]
    assert len({getattr(each, "name", "") or each.color for each in all_colors()}) == len(named)
    assert len(set(named)) == len(named)


def test_a_format_has_one_color_at_every_site():
    modes = [tables.modes()[f"{f}mxfp4"] for f in ("FA_", "linear_", "FA_linear_", "")]
    looks = {look(mode.types("fprop")) for mode in modes}
    assert {one.light for one in looks} == {colors.colors()["mxfp4"].light}
    assert len({one.dash for one in looks}) == 4


def test_a_legend_in_words_has_what_is_there():
    text, dashes = colors.legend([{}, {"fprop": "mxfp4"}, {"fprop": "mxfp8", "dgrad": "mxfp8"}])
    assert text == "mxfp4 orange; mxfp8 blue; unquantized black, on dark pages white"
    assert dashes == "linear layers dashed"


def test_a_legend_names_a_custom_quantizer():
    text, _ = colors.legend([{"fprop": "mine"}, {"fprop": "mxfp8", "qk": "mxfp4"}])
    assert text.startswith("mine purple; mixed purple; unquantized")


def test_the_modes_with_scripts_look_different():
    modes = [mode for mode in tables.modes().values() if mode.scripts]
    assert len({look(mode.types("fprop")) for mode in modes}) == len(modes) == 10


def test_the_modes_of_every_type_look_different():
    families = ("FA_", "linear_", "FA_linear_", "")
    modes = [tables.modes()[f + kind] for f in families for kind in tables.quant_types()]
    assert len({look(mode.types("fprop")) for mode in modes}) == len(modes)


def test_a_mixture_and_a_type_of_another_tree_have_a_look_too():
    mixed = look({"fprop": "mxfp4", "qk": "mxfp8"})
    assert mixed.light == colors.colors()["mixed"].light
    assert look({"fprop": "int4"}).light == colors.colors()["mixed"].light
    assert look({}) == look({"fprop": "none"})
