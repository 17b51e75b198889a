"""Rows of [plugins]: what makes a quantizer a type whose code is not run."""

import pytest
from mqo.quant.backend import fake_quantize
from mqo.quant.formats import QUANT_TYPES
from mqo.quant.plugin_context import QuantizerError
from mqo.quant.plugin_decorators import quantizer
from mqo.quant.plugin_rows import PluginRow, check_free, declare
from mqo.quant.plugins import PLUGINS, Plugin, registrations
from mqo.quant.spec import QuantSpec
from torch import ones

OPTIONS = {"on": True, "count": 3, "gain": 2.0, "kind": "a"}
FULL = {"block": 16, "square": True, "needs_tensor_amax": True, "options": OPTIONS}


def test_a_row_makes_a_type_without_a_function():
    PluginRow("plugins/mine/mine.py", "00ff", FULL, {"gain": 4, "on": False}).declare("mine")
    assert {"mine": Plugin("mine", **FULL)} == PLUGINS
    assert PLUGINS["mine"].function is None
    spec = QuantSpec("mine", tile="square", options={"count": 5})
    assert dict(spec.options) == OPTIONS | {"count": 5}
    with pytest.raises(QuantizerError, match="load_quantizers"):
        fake_quantize(ones(4, 16), spec)


def test_a_row_holds_no_empty_values():
    """So a row without a file, for what calls no function, has only what is declared."""
    assert PluginRow().as_table() == {}
    assert PluginRow(declared={"block": 16}).as_table() == {"declared": {"block": 16}}
    row = PluginRow("a.py", "00ff", FULL, {"on": False})
    assert PluginRow(**row.as_table()) == row


@pytest.mark.parametrize("name", QUANT_TYPES)
def test_no_type_of_mqo_is_replaced(name):
    with pytest.raises(ValueError, match=f"'{name}'"):
        check_free(name)
    with pytest.raises(ValueError, match=f"'{name}'"):
        PluginRow().declare(name)
    assert PLUGINS == {}


@pytest.mark.parametrize("file", ["/tmp/mine.py", "../mine.py", "plugins/../../mine.py", ".."])
def test_a_file_outside_of_the_run_is_refused(file):
    with pytest.raises(ValueError, match="mine"):
        PluginRow(file).declare("mine")
    assert PLUGINS == {}


# test_plugin_source.py has the declarations that are wrong wherever they are made.
@pytest.mark.parametrize(
    ("declared", "options"),
    [
        ({"blok": 16}, {}),
        ({"needs_amax": True}, {}),  # the argument's name, and not the field's
        ({"name": "other"}, {}),
        ({"block": "16"}, {}),
        ({"options": {"gain": float("nan")}}, {}),
        ({}, {"gain": 2.0}),
        (FULL, {"gian": 2.0}),
        (FULL, {"gain": "2.0"}),
        (FULL, {"gain": True}),
        (FULL, {"gain": float("inf")}),
        (FULL, {"gain": 10**400}),
        (FULL, {"count": 3.0}),
        (FULL, {"count": True}),
        (FULL, {"count": 1 << 70}),
        (FULL, {"on": 1}),
        (FULL, {"kind": 1}),
        (FULL, {"kind": "a\nb"}),
        (FULL, {"kind": "\udcff"}),
    ],
)
def test_an_invalid_row_is_refused(declared, options):
    with pytest.raises(ValueError, match="mine"):
        PluginRow("plugins/mine/mine.py", "00ff", declared, options).declare("mine")
    assert PLUGINS == {}


def double(x, context):
    return 2 * x


def test_a_function_stays_as_long_as_the_declaration_is_equal():
    quantizer("mine", block=16, options={"gain": 2.0})(double)
    before = registrations()
    declare(Plugin("mine", block=16, options={"gain": 2.0}))
    assert PLUGINS["mine"].function is double
    assert registrations() == before  # what was read of the type is still so
    declare(Plugin("mine", block=32, options={"gain": 2.0}))
    assert PLUGINS["mine"].function is None and PLUGINS["mine"].block == 32
    assert registrations() > before


def test_a_function_that_is_known_only_elsewhere_is_left_out():
    declare(Plugin("mine", function=double))
    assert PLUGINS["mine"].function is None
