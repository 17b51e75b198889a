import sys

import libcst as cst
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqo.errors import OverlayError
from mqo.overlay.quant_types import modifier, rewrite
from mqo.overlay.quant_types.rewrite import set_values
from mqo.quant.source import Source, splice

PATH = "layers.py"
LINES = [
    b"custom_quant_type = '%s'",
    b'custom_quant_type = "%s"',
    b"custom_quant_type\t=\t'%s'\t# 'mxfp4'",
    b"(custom_quant_type) = ('%s')",
    b"custom_quant_type: str = '%s'",
    b"custom_quant_type = U'%s'",
    b"custom_quant_type = R'''%s'''",
    b"custom_quant_type = \\\n '%s'",
    b"x = '\xc3\xa9'; custom_quant_type = '%s'; y = 1",
    b"if x: custom_quant_type = '%s'",
    b"if x:\n\tcustom_quant_type = '%s'",
    b"if x:\n \x0c  custom_quant_type = '%s'\n",
    b"if x:\n\x0c  custom_quant_type = '%s'\n",
    b"\xef\xbb\xbfx = 1\r\ncustom_quant_type = '%s'\r\n",
    b"# coding: latin-1\nx = '\xe9'\ncustom_quant_type = '%s' # \xe9\n",
    b"x = 1\rcustom_quant_type = '%s'\ry = 2\r",
    b"x = 1\x0c\ncustom_quant_type = '%s'\n",
    b"try:\n  pass\nexcept E:\n  custom_quant_type = '%s'\n   \n  ",
]
# LibCST and Python's parser must pass over these alike.
OTHERS = [
    b"",
    b"custom_quant_type = 'mx' 'fp8'\n",
    b"custom_quant_type = 'mxfp8' ''\n",
    b"custom_quant_type = 'mx\\x66p8'\n",
    b"custom_quant_type = b'mxfp8'\n",
    b"custom_quant_type = x = 'mxfp8'\n",
    b"custom_quant_type = f'{x}'\n",
    b"custom_quant_type = '''a'b'''\n",
    b"f(custom_quant_type='mxfp8')\n",
]


def literals(content):
    return list(Source.parse(content).literals.values())


@pytest.mark.parametrize("after", OTHERS)
@pytest.mark.parametrize("line", LINES)
def test_only_the_value_changes(line, after):
    content = line % b"none"
    content += after and b"\n" + after
    chosen = dict.fromkeys(literals(content), "mxfp8")
    assert len(chosen) == 1
    assert set_values(PATH, content, chosen) == splice(content, chosen)


@given(st.lists(st.sampled_from(LINES[:11]), min_size=1, max_size=6), st.data())
def test_any_of_several_literals_are_set(lines, data):
    content = b"\n".join(line % b"none" for line in lines) + b"\n"
    chosen = data.draw(st.sets(st.sampled_from(literals(content))))
    values = {literal: data.draw(st.sampled_from(["", "hifp8"])) for literal in chosen}
    assert set_values(PATH, content, values) == splice(content, values)


def test_a_literal_that_only_one_parser_reads_is_refused(monkeypatch):
    content = b"custom_quant_type = 'none'\n"
    monkeypatch.setattr(rewrite, "_LITERAL", cst.matchers.Pass())
    with pytest.raises(OverlayError, match=PATH):
        set_values(PATH, content, dict.fromkeys(literals(content), "mxfp8"))


@pytest.mark.parametrize("damage", [b" # x", b"\nx = 1"])
def test_a_result_with_other_changes_is_refused(monkeypatch, damage):
    content = b"custom_quant_type = 'none'\n"
    whole = rewrite._whole
    monkeypatch.setattr(rewrite, "_whole", lambda *given: whole(*given).rstrip() + damage + b"\n")
    with pytest.raises(OverlayError, match=PATH):
        set_values(PATH, content, dict.fromkeys(literals(content), "mxfp8"))


def test_the_modifier_writes_nothing_without_libcst(tmp_path, monkeypatch):
    path = tmp_path / "megatron/core/transformer/dot_product_attention.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "class A:\n"
        "    def forward(self, query, key, value):\n"
        "        custom_quant_type = 'none'\n"
        "        return typed_matmul(query, key, custom_quant_type)\n"
    )
    before = path.read_bytes()
    monkeypatch.setitem(sys.modules, "libcst", None)
    monkeypatch.delitem(sys.modules, "mqo.overlay.quant_types.rewrite")
    with pytest.raises(ImportError):
        modifier.modify(tmp_path, {"qk": "mxfp8"})
    assert path.read_bytes() == before
