import ast
import re
import warnings

import pytest
from mqo.errors import DriftError
from mqo.overlay.codemod import Codemod, Source, Splice, apply_codemod
from mqo.overlay.drift import Place


def named(source, name):
    return (n for n in source.walk() if isinstance(n, ast.Name) and n.id == name)


RENAME = Codemod(
    roots=("core/",),
    needle=re.compile(rb"old"),
    splices=lambda source: (Splice.over(node, "brand_new") for node in named(source, "old")),
    leftovers=lambda source: (Place(n.lineno, "old") for n in named(source, "old")),
)


def rewritten(content, codemod=RENAME):
    return apply_codemod("core/x.py", content, codemod, "the_codemod")


def rule(splices=lambda source: (), leftovers=lambda source: ()):
    return Codemod(("core/",), re.compile(rb"old"), splices, leftovers)


def with_import(source):
    yield source.import_splice("import q")


# -- splicing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        b"x = old + old.y  # old\n",
        b"x = [\r\n\told,\r\n]\r\n",
        b"x = (1,   old)   \n",
        b"s = 'old'; x = old",
        b"\xef\xbb\xbfold.start()\nold\n",
        "s = 'é∂𝄞'; x = old\n".encode(),
        b"\x0cx = 1\n\x0c\nx = old\n",
    ],
)
def test_matches_change_and_every_other_byte_stays(source):
    literal, comment = b"'old'", b"# old"
    expected = source.replace(literal, b"'%'").replace(comment, b"# %")
    expected = expected.replace(b"old", b"brand_new").replace(b"%", b"old")
    assert rewritten(source) == expected
    assert rewritten(expected) == expected


def test_of_an_insertion_and_a_replacement_at_one_place_the_insertion_goes_first():
    splices = rule(
        lambda s: [Splice.over(s.tree.body[0].value, "new"), s.import_splice("import q")]
    )
    assert rewritten(b"old\n", splices) == b"import q\nnew\n"


def test_a_file_without_a_match_is_given_back_as_it_is():
    assert rewritten(b"word = 'old'  \r\n") == b"word = 'old'  \r\n"


# -- what a codemod concerns ---------------------------------------------------------------------


def test_a_codemod_concerns_files_below_its_roots_that_hold_its_needle():
    assert RENAME.concerns("core/a/b.py", b"old")
    assert not RENAME.concerns("other/a.py", b"old")
    assert not RENAME.concerns("core/a.py", b"young")


def test_a_walk_enters_the_statements_whose_lines_hold_the_needle():
    text = b"@old\ndef f():\n    a = 1\n    b = (\n        old\n    )\n\ndef g():\n    c = 1\n"
    names = {n.id for n in Source(text, re.compile(rb"old")).walk() if isinstance(n, ast.Name)}
    assert names == {"old", "b"}


# -- the postcondition -------------------------------------------------------------------------


def test_a_leftover_stops_the_codemod_and_is_named_with_its_line():
    blind = rule(leftovers=lambda s: [Place(3, "old()"), Place(2, "old")])
    with pytest.raises(DriftError) as caught:
        rewritten(b"old\n\n\n", blind)
    for part in ("codemod 'the_codemod' leaves 2 unchanged", "core/x.py:2 old, core/x.py:3 old()"):
        assert part in str(caught.value)


def test_leftovers_are_looked_for_in_the_result():
    half = rule(lambda s: [Splice.over(next(named(s, "old")), "new")], RENAME.leftovers)
    with pytest.raises(DriftError, match=r"'the_codemod' leaves 1 "):
        rewritten(b"old + old\n", half)


def test_a_leftover_is_named_with_the_line_of_the_file_as_upstream_wrote_it():
    def import_alone(source):
        yield source.import_splice("import q")

    blind = rule(import_alone, RENAME.leftovers)
    with pytest.raises(DriftError, match=r"core/x\.py:3 old\."):
        apply_codemod(
            "core/x.py", b"import a\nimport b\n\nold\n", blind, "s", pristine=b"#\n\nold\n"
        )
    with pytest.raises(DriftError, match=r"core/x\.py:4 old\."):
        rewritten(b"import a\nimport b\n\nold\n", blind)


def test_what_a_rule_refuses_is_named_with_its_file():
    def refuse(source):
        raise DriftError("line 1 is odd", expected="an even one")

    with pytest.raises(DriftError, match=r"core/x\.py: line 1 is odd.*an even one"):
        rewritten(b"old\n", rule(refuse))


def test_a_result_that_is_no_python_is_refused():
    with pytest.raises(DriftError, match="Python after codemod 'the_codemod'"):
        rewritten(b"old\n", rule(lambda s: [Splice.over(s.tree.body[0], "new(")]))


@pytest.mark.parametrize(
    "source", [b"old = (\n", b"old = '\xff'\n", "# coding: latin-1\nold = 'é'\n".encode("latin-1")]
)
def test_source_that_is_no_python_in_utf_8_is_refused(source):
    with pytest.raises(DriftError, match=r"core/x\.py does not parse"):
        rewritten(source)


# -- where an import goes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (b"x = old\n", b"import q\nx = old\n"),
        (b"# Licence.\n\nimport a\n", b"# Licence.\n\nimport q\nimport a\n"),
        (b'"""Words."""\nimport a\n', b'"""Words."""\nimport q\nimport a\n'),
        (b'"""Two\nlines."""\n\nimport a\n', b'"""Two\nlines."""\nimport q\n\nimport a\n'),
        (
            b'"""W."""\nfrom __future__ import z\nimport a\n',
            b'"""W."""\nfrom __future__ import z\nimport q\nimport a\n',
        ),
        (b"@deco\nclass A:\n    pass\n", b"import q\n@deco\nclass A:\n    pass\n"),
        (b"import a\r\n", b"import q\r\nimport a\r\n"),
        (b"\xef\xbb\xbfimport a\n", b"\xef\xbb\xbfimport q\nimport a\n"),
    ],
)
def test_an_import_goes_behind_docstring_and_future_imports(source, expected):
    assert rewritten(source, rule(with_import)) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (b"old\n", b"one\ntwo\n"),
        (b"if a:\n\told\n", b"if a:\n\tone\n\ttwo\n"),
        (b"if a: old\n", b"if a: one; two\n"),
        (b"old\r\nx = 1\r\n", b"one\r\ntwo\r\nx = 1\r\n"),
    ],
)
def test_statements_in_the_place_of_one_are_indented_as_it_was(source, expected):
    def two_lines(parsed):
        old = next(n for n in parsed.walk() if isinstance(n, ast.Expr))
        yield parsed.lines_over(old, ["one", "two"])

    assert rewritten(source, rule(two_lines)) == expected


def test_an_invalid_escape_sequence_in_upstream_is_read_without_a_warning():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ast.parse(r"pattern = '\-'", "a file")
        Source(rb"pattern = '\-'", re.compile(rb"pattern"))
    assert [one.filename for one in said] == ["a file"]
