import pytest
from megatron.quant import site_types

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


def test_a_literal_without_a_binding_names_no_site(types):
    text = "def forward():\n    custom_quant_type = 'mxfp8'\n    return custom_quant_type\n"
    assert types(text) == {}


def test_the_patched_tree_says_what_its_modifier_reads(vendored):
    path = "megatron/core/transformer/dot_product_attention.py"
    from mqo.overlay import literals

    said = {literal.site: literal.value for literal in literals.read(vendored.read(path))}
    assert set(said) == {"qk", "pv"}
    assert site_types(str(vendored.root / path)) == said
