from hypothesis import given
from hypothesis import strategies as st
from mqo.overlay import literals

SOURCE = b"""
class A:
    def f(self):
        custom_quant_type = 'none'
        a = bind('fprop', custom_quant_type, x)
        if x:
            custom_quant_type = 'mxfp8'  # why
            b = bind('qk', custom_quant_type)
        else:
            custom_quant_type = 'none'
        return custom_quant_type
"""


def test_a_literal_is_read_with_its_site_value_and_line():
    found = [(t.site, t.value, t.line) for t in literals.read(SOURCE)]
    assert found == [("fprop", "none", 4), ("qk", "mxfp8", 7)]
    assert literals.read(b"custom_quant_type = 'mxfp8'\nx = 1\n") == []  # it binds no site


def test_writing_changes_the_named_sites_and_no_other_byte():
    new = literals.write(SOURCE, {"fprop": "hifp8", "pv": "mxfp4"})
    assert new == SOURCE.replace(b"'none'\n        a", b"'hifp8'\n        a")


def test_a_line_end_of_windows_and_a_comment_stay():
    source = SOURCE.replace(b"\n", b"\r\n")
    new = literals.write(source, {"qk": "none"})
    assert new == source.replace(b"'mxfp8'  # why", b"'none'  # why")


TYPES = st.sampled_from(["none", "mxfp8", "mxfp4", "hifp8"])


@given(TYPES, TYPES)
def test_neutral_undoes_any_writing(fprop, qk):
    written = literals.write(SOURCE, {"fprop": fprop, "qk": qk})
    assert [t.value for t in literals.read(written)] == [fprop, qk]
    assert literals.neutral(written) == literals.neutral(SOURCE)
    assert {t.value for t in literals.read(literals.neutral(written))} == {"none"}


def test_neutral_keeps_every_other_difference():
    assert literals.neutral(SOURCE + b"x = 1\n") != literals.neutral(SOURCE)
