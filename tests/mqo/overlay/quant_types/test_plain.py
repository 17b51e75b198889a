import warnings

import pytest
from mqo.errors import OverlayError
from mqo.overlay.quant_types.plain import Source, splice


def literals(content):
    content = content if isinstance(content, bytes) else content.encode()
    return Source.parse("x.py", content).all_literals()


def rewritten(content):
    """`content` with every literal's value as NEW."""
    return splice(content, dict.fromkeys(literals(content), "NEW"))


@pytest.mark.parametrize(
    "line",
    [
        b"custom_quant_type = '%s'",
        b'custom_quant_type = "%s"',
        b"custom_quant_type='%s'",
        b"custom_quant_type\t=\t'%s'\t# 'mxfp4'",
        b"custom_quant_type = ('%s')",
        b"custom_quant_type: str = '%s'",
        b"custom_quant_type = u'%s'",
        b"custom_quant_type = r'%s'",
        b"custom_quant_type = '''%s'''",
        b'custom_quant_type = """%s"""',
        b"custom_quant_type = \\\n '%s'",
        b"x = '\xc3\xa9'; custom_quant_type = '%s'; y = 1",
        b"if x: custom_quant_type = '%s'",
        b"if x:\n\tcustom_quant_type = '%s'",
        b"\xef\xbb\xbfx = 1\r\ncustom_quant_type = '%s'\r\n",
        b"# coding: latin-1\nx = '\xe9'\ncustom_quant_type = '%s' # \xe9\n",
        b"x = 1\rcustom_quant_type = '%s'\ry = 2\r",
        b"x = 1\x0c\ncustom_quant_type = '%s'\n",
    ],
)
@pytest.mark.parametrize("value", [b"mxfp8", b""])
def test_the_value_alone_is_replaced(line, value):
    assert [literal.value for literal in literals(line % value)] == [value.decode()]
    assert rewritten(line % value) == line % b"NEW"


@pytest.mark.parametrize(
    "line",
    [
        "custom_quant_type = 'mx' 'fp8'",
        "custom_quant_type = 'mx' + 'fp8'",
        "custom_quant_type = f'{x}'",
        "custom_quant_type = 'mx\\x66p8'",
        "custom_quant_type = b'mxfp8'",
        "custom_quant_type = None",
        "custom_quant_type = x = 'mxfp8'",
        "custom_quant_type, x = 'mxfp8', 1",
        "self.custom_quant_type = 'mxfp8'",
        "f(custom_quant_type='mxfp8')",
        "custom_quant_type == 'mxfp8'",
        "custom_quant_type: str",
        "# custom_quant_type = 'mxfp8'",
        "'''\ncustom_quant_type = 'mxfp8'\n'''",
    ],
)
def test_what_is_no_plain_literal(line):
    assert literals(line) == []


def test_several_are_found_in_source_order_with_their_lines():
    source = "def f():\n  custom_quant_type = 'b'\n\ncustom_quant_type = 'a'\n"
    assert [(lit.value, lit.line) for lit in literals(source)] == [("b", 2), ("a", 4)]


def test_several_are_replaced_by_values_of_other_lengths():
    content = b"custom_quant_type = 'none'; custom_quant_type = 'x'  # end"
    first, second = literals(content)
    new = splice(content, {second: "", first: "longer"})
    assert new == b"custom_quant_type = 'longer'; custom_quant_type = ''  # end"


@pytest.mark.parametrize("content", [b"x = 1\nif:\n", b"x = 1\ny = '\xe9'\n", b"x = 1\n\0"])
def test_what_is_no_python_is_named_with_its_line(content):
    with pytest.raises(OverlayError, match=r"^a/x\.py:\d+ cannot be read as Python"):
        Source.parse("a/x.py", content)


def test_doubtful_python_of_others_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert literals(r"x = '\d'") == []
