import textwrap

import pytest
from mqo.errors import DriftError
from mqo.overlay.drift import Place, in_upstream, locations_text, nearest, nearest_names
from mqo.overlay.edits import AddImport, Anchor, FileEdits, PrependBody, ReplaceExpression
from mqo.overlay.plan import plan
from mqo.overlay.rewrite import rewrite

from ..conftest import FILES

SOURCE = '''"""A look-alike."""
import mm


class Linear:
    def forward(self, rows, weight):
        total = gather(rows)
        return mm.product(total, weight.turned(), out=None)

    def backward(self, grad, weight):
        rows = mm.product(
            grad,  # from above
            weight,
        )
        return rows, mm.product(grad.turned(), rows)


class Frozen:
    def forward(self, rows, weight):
        return mm.product(rows, weight.turned())
'''


def report(*edits, source=SOURCE, **options):
    """The text of the DriftError that `edits` raise."""
    with pytest.raises(DriftError) as caught:
        rewrite(source.encode(), FileEdits("core/x.py", edits), "1.0", "the_entry", **options)
    return str(caught.value)


def wanted(scope, pattern, count=1):
    return ReplaceExpression(scope, Anchor(pattern, count), "HIT")


# -- what a report says ------------------------------------------------------------------------


def test_every_place_of_a_pattern_that_occurs_too_often_is_named():
    text = report(wanted("", "weight.turned()"))
    assert "occurs 2 times instead of 1, at core/x.py:8, core/x.py:20. Expected" in text
    assert "nearest" not in text


def test_a_pattern_whose_operand_was_renamed_has_the_call_as_nearest():
    text = report(wanted("Linear.forward", "mm.product(rows, weight.turned(), ...)"))
    assert "in Linear.forward: `mm.product(rows, weight.turned(), ...)` occurs 0 times" in text
    near = "nearest: core/x.py:8 `mm.product(total, weight.turned(), out=None)`"
    assert near in text


def test_of_a_pattern_that_occurs_too_seldom_both_the_places_and_the_nearest_are_named():
    text = report(wanted("Linear.backward", "mm.product(grad, weight)", 2))
    assert "occurs 1 times instead of 2, at core/x.py:11; nearest: core/x.py:15 `mm.prod" in text
    assert "core/x.py:11 `" not in text


def test_code_of_several_lines_is_shown_in_one():
    text = report(wanted("Linear.backward", "mm.product(grad, weights)"))
    assert "nearest: core/x.py:11 `mm.product( grad, # from above weight, )`" in text


def test_code_that_moved_out_of_the_scope_is_found_in_the_file():
    text = report(wanted("Frozen.forward", "mm.product(grad.turned(), rows)[0]"))
    assert "nearest: core/x.py:20 `mm.product(rows, weight.turned())`" in text
    text = report(wanted("Frozen.forward", "gather(rows)[0]"))
    assert "nearest: core/x.py:7 `gather(rows)`" in text


def test_a_statement_is_compared_with_statements():
    text = report(wanted("Linear.forward", "total = gather(rows, group)"))
    assert "nearest: core/x.py:7 `total = gather(rows)`." in text


def test_where_nothing_looks_alike_the_report_says_so():
    assert "nearest: none. Expected" in report(wanted("Linear.forward", "torch.bmm(a, b, c)"))


def test_a_missing_function_has_those_of_its_name_and_of_similar_names_as_nearest():
    text = report(PrependBody("Lineal.forward", "pass\n"))
    assert "`Lineal.forward` is defined 0 times instead of once" in text
    near = "nearest: core/x.py:6 `Linear.forward`, core/x.py:19 `Frozen.forward`"
    assert near in text


def test_a_renamed_method_is_found():
    text = report(PrependBody("Linear.backwards", "pass\n"))
    assert "nearest: core/x.py:10 `Linear.backward`" in text


def test_a_function_that_is_defined_twice_is_named_with_both_lines():
    text = report(PrependBody("f", "pass\n"), source="def f():\n    pass\n\ndef f():\n    pass\n")
    assert "`f` is defined 2 times instead of once, at core/x.py:1, core/x.py:4." in text


def test_lines_are_upstreams_whatever_earlier_entries_inserted():
    edits = (AddImport("import os"), PrependBody("Linear.forward", "one()\ntwo()\n"))
    patched = rewrite(SOURCE.encode(), FileEdits("core/x.py", edits), "1.0", "an_entry")
    edit = wanted("Linear.backward", "mm.product(grad, weights)")
    text = report(edit, source=patched.decode(), pristine=SOURCE.encode())
    assert "nearest: core/x.py:11 `" in text
    assert "nearest: core/x.py:14 `" in report(edit, source=patched.decode())


def test_a_report_changes_nothing_although_something_looks_alike(mini):
    from mqo.overlay.apply import apply

    mini.change_patch("quant_sites.py", "grad.matmul(weight)", "grad.matmul(weights)")
    with pytest.raises(DriftError, match=r"nearest: .*layers\.py:12 `grad\.matmul\(weight\)`"):
        apply(mini.tree, mini.series)
    assert mini.bytes() == FILES
    assert mini.tree.manifest() is None


@pytest.mark.parametrize(("old", "new"), [("grad.matmul(weight)", "grad.mm(w)"), ("FILES", "X")])
def test_a_plan_adds_the_versions_that_the_series_is_known_good_for(mini, old, new):
    if old == "FILES":
        mini.change_patch("quant_sites.py", '"megatron/core/layers.py"', '"megatron/core/lay.py"')
    else:
        mini.change_patch("quant_sites.py", old, new)
    with pytest.raises(DriftError, match=r"known good: megatron-core >=1,<2\. "):
        plan(mini.series, "1.2.3", FILES, FILES.__getitem__)


def test_a_file_that_moved_is_found():
    assert nearest_names("core/a/x.py", ["core/b/x.py", "core/y.py", "core/a/xy.py"], "/") == [
        "core/b/x.py",
        "core/a/xy.py",
        "core/y.py",
    ]


# -- likeness ----------------------------------------------------------------------------------


def places(*codes):
    return [Place(number, code) for number, code in enumerate(codes, 1)]


def test_the_nearest_come_first_and_there_are_three_at_most():
    codes = ["f(x, y)", "f(a, b)", "f(a, y)", "f(a, b, c)", "zz"]
    assert [p.code for p in nearest("f(a, b, d)", places(*codes))] == [
        "f(a, b, c)",
        "f(a, b)",
        "f(a, y)",
    ]


def test_of_what_shares_as_many_tokens_the_likest_in_letters_comes_first():
    codes = ["f(input)", "f(total_input)"]
    assert nearest("f(totl_input)", places(*codes))[0].code == "f(total_input)"


def test_one_place_a_line_is_named():
    found = nearest("g(a)", [Place(3, "x(g(b))"), Place(3, "g(b)"), Place(4, "g(c)")])
    assert found == [Place(3, "g(b)"), Place(4, "g(c)")]


def test_layout_does_not_count():
    assert nearest("g(a, b)", places("g( a,\n   b )")) == places("g( a,\n   b )")


def test_an_empty_end_of_a_sentence():
    assert locations_text("x.py", [], None) == ""


# -- lines -------------------------------------------------------------------------------------

OLD = textwrap.dedent(
    """\
    one
    two
    three
    four
    """
).encode()


@pytest.mark.parametrize(
    ("new", "lines"),
    [
        (OLD, [1, 2, 3, 4]),
        (b"new\n" + OLD, [1, 1, 2, 3, 4]),
        (b"one\ntwo\nnew\nnew\nthree\nfour\n", [1, 2, 3, 3, 3, 4]),
        (b"one\nthree\nfour\n", [1, 3, 4]),
        (b"one\nTWO\nthree\nfour\n", [1, 2, 3, 4]),
    ],
)
def test_each_line_has_one_of_upstreams(new, lines):
    asked = [Place(number, "x") for number in range(1, len(lines) + 1)]
    assert [place.line for place in in_upstream(asked, OLD, new)] == lines
