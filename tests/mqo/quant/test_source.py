import ast
import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqo.quant import source
from mqo.quant.formats import ATTENTION_BACKWARD
from mqo.quant.source import Source, site_types, splice

PLAIN = """
custom_quant_type = 'mxfp4'

class Attention:
    def forward(self, query, key):
        custom_quant_type = 'mxfp8'
        qk_operands = gemm_operands('qk', custom_quant_type, self)
        if self.fast:
            return query
        for _ in range(2):
            custom_quant_type = "none"
            pv_operands = gemm_operands('pv', custom_quant_type, self)
        return key
"""


@pytest.fixture
def types(tmp_path):
    """What `site_types` finds in a text."""

    def find(text):
        path = tmp_path / "module.py"
        path.write_text(text)
        return site_types(str(path))

    return find


def test_each_site_has_the_type_of_the_literal_in_front_of_its_binding(types):
    assert types(PLAIN) == {"qk": "mxfp8", "pv": "none"}


@pytest.mark.parametrize("value", ["manager.type_of('pv')", "'no' + 'ne'", "None"])
def test_a_type_that_is_no_plain_literal_is_left_out(types, value):
    assert types(PLAIN.replace('"none"', value)) == {"qk": "mxfp8"}


@pytest.mark.parametrize("behind", ["return custom_quant_type", "scale = self.scale_of('qk', 8)"])
def test_a_literal_without_a_binding_names_no_site(types, behind):
    assert types(f"def forward():\n    custom_quant_type = 'mxfp8'\n    {behind}\n") == {}


def test_the_patched_tree_says_what_its_modifier_reads(vendored):
    path = "megatron/core/transformer/dot_product_attention.py"
    from mqo.overlay import literals

    said = {literal.site: literal.value for literal in literals.read(vendored.read(path))}
    assert set(said) == {"qk", "pv", *ATTENTION_BACKWARD}
    assert site_types(str(vendored.root / path)) == said


def test_the_standard_library_is_all_it_needs():
    tree = ast.parse(Path(source.__file__).read_text())
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {getattr(n, "module", None) or n.names[0].name for n in imports}
    assert names
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names
    assert not any(getattr(n, "level", 0) for n in imports)


# -- literals and their bytes ------------------------------------------------------------------


def literals(content):
    return list(Source.parse(content).literals.values())


def rewritten(content):
    """`content` with every literal's value as NEW."""
    return splice(content, dict.fromkeys(literals(content), "NEW"))


FORMS = [
    b"custom_quant_type = '%s'",
    b'custom_quant_type = "%s"',
    b"custom_quant_type='%s'",
    b"custom_quant_type\t=\t'%s'\t# 'mxfp4'",
    b"(custom_quant_type) = ('%s')",
    b"custom_quant_type: str = '%s'",
    b"custom_quant_type = U'%s'",
    b"custom_quant_type = r'%s'",
    b"custom_quant_type = R'''%s'''",
    b'custom_quant_type = """%s"""',
    b"custom_quant_type = \\\n '%s'",
    b"x = '\xc3\xa9'; custom_quant_type = '%s'; y = 1",
    b"if x: custom_quant_type = '%s'",
    b"if x:\n\tcustom_quant_type = '%s'",
    b"if x:\n \x0c  custom_quant_type = '%s'\n",
    b"if x:\n\x0c  custom_quant_type = '%s'\n",
    b"x = 1\x0c\ncustom_quant_type = '%s'\n",
    b"try:\n  pass\nexcept E:\n  custom_quant_type = '%s'\n   \n  ",
    # Forms of a whole file follow.
    b"\xef\xbb\xbfx = 1\r\ncustom_quant_type = '%s'\r\n",
    b"# coding: latin-1\nx = '\xe9'\ncustom_quant_type = '%s' # \xe9\n",
    b"x = 1\rcustom_quant_type = '%s'\ry = 2\r",
]
OTHERS = [
    b"custom_quant_type = 'mx' 'fp8'",
    b"custom_quant_type = 'mxfp8' ''",
    b"custom_quant_type = 'mx' + 'fp8'",
    b"custom_quant_type = f'{x}'",
    b"custom_quant_type = 'mx\\x66p8'",
    b"custom_quant_type = b'mxfp8'",
    b"custom_quant_type = '''a'b'''",
    b"custom_quant_type = None",
    b"custom_quant_type = x = 'mxfp8'",
    b"custom_quant_type, x = 'mxfp8', 1",
    b"self.custom_quant_type = 'mxfp8'",
    b"f(custom_quant_type='mxfp8')",
    b"custom_quant_type == 'mxfp8'",
    b"custom_quant_type: str",
    b"# custom_quant_type = 'mxfp8'",
    b"'''\ncustom_quant_type = 'mxfp8'\n'''",
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [b"mxfp8", b""])
def test_the_value_alone_is_replaced(form, value):
    assert [literal.value for literal in literals(form % value)] == [value.decode()]
    assert rewritten(form % value) == form % b"NEW"


@pytest.mark.parametrize("other", OTHERS)
def test_what_is_no_plain_literal(other):
    assert literals(other) == []
    for form in FORMS:
        assert rewritten(form % b"none" + b"\n" + other) == form % b"NEW" + b"\n" + other


@given(st.lists(st.tuples(st.sampled_from(FORMS[:18]), st.sampled_from([b"none", b"", b"hifp8"]))))
def test_any_of_several_are_replaced(pairs):
    content = b"\n".join(form % b"none" for form, _ in pairs)
    after = [literal.decode() for _, literal in pairs]
    values = dict(zip(literals(content), after, strict=True))
    chosen = {literal: value for literal, value in values.items() if value != "none"}
    assert splice(content, chosen) == b"\n".join(form % value for form, value in pairs)


def test_several_are_found_in_source_order_with_their_lines():
    source = "def f():\n  custom_quant_type = 'b'\n\ncustom_quant_type = 'a'\n"
    assert [(lit.value, lit.line) for lit in literals(source.encode())] == [("b", 2), ("a", 4)]


def test_several_are_replaced_by_values_of_other_lengths():
    content = b"custom_quant_type = 'none'; custom_quant_type = 'x'  # end"
    first, second = literals(content)
    new = splice(content, {second: "", first: "longer"})
    assert new == b"custom_quant_type = 'longer'; custom_quant_type = ''  # end"


@pytest.mark.parametrize(
    "content",
    [
        b"x = 1\nif:\n",
        b"x = 1\ny = '\xe9'\n",
        b"x = 1\n\0",
        b"x = " + b"(" * 500 + b")" * 500,
    ],
    ids=["broken", "not UTF-8", "a null byte", "nested too deeply"],
)
def test_what_is_no_python_is_an_error(content):
    with pytest.raises((SyntaxError, ValueError)):
        Source.parse(content)


def test_doubtful_python_of_others_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert literals(rb"x = '\d'") == []
