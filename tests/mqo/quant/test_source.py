import ast
import sys
import warnings
from pathlib import Path

import pytest
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
    content = content if isinstance(content, bytes) else content.encode()
    return list(Source.parse(content).literals.values())


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
        "custom_quant_type = 'mxfp8' ''",
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


@pytest.mark.parametrize(
    "content",
    [b"x = 1\nif:\n", b"x = 1\ny = '\xe9'\n", b"x = 1\n\0", b"x = " + b"(" * 500 + b")" * 500],
    ids=["broken", "not UTF-8", "a null byte", "nested too deeply"],
)
def test_what_is_no_python_is_an_error(content):
    with pytest.raises((SyntaxError, ValueError)):
        Source.parse(content)


def test_doubtful_python_of_others_gives_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert literals(r"x = '\d'") == []
