import re
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mqo.errors import DriftError
from mqo.overlay.edits import (
    AddImport,
    AddParameters,
    Anchor,
    FileEdits,
    InsertBefore,
    PrependBody,
    ReplaceExpression,
    WrapOperands,
)
from mqo.overlay.rewrite import rewrite


def rewritten(source, *edits, version="1.0"):
    if isinstance(source, str):
        source = textwrap.dedent(source).encode()
    return rewrite(source, FileEdits("core/x.py", edits), version, "the_entry").decode()


def replaced(expression, pattern, count=1):
    """The expression after each match of `pattern` became HIT."""
    edit = ReplaceExpression("f", Anchor(pattern, count), "HIT")
    source = f"def f():\n    return {expression}\n"
    return rewritten(source, edit).removeprefix("def f():\n    return ").removesuffix("\n")


# -- what a pattern matches --------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression",
    [
        "g(a, b.t())",
        "g( a,b . t ( ) )",
        "g(a, (b.t()))",
        "(g)(a, b.t(),)",
        "g(\n        a,  # the left one\n        b.t(),\n    )",
    ],
)
def test_a_pattern_is_blind_to_layout_comments_and_redundant_parentheses(expression):
    assert replaced(expression, "g(a, b.t())") == "HIT"


@pytest.mark.parametrize("text", ["'k'", '"k"', '"""k"""', "r'k'", r"'\x6b'"])
def test_a_pattern_is_blind_to_quotes(text):
    assert replaced(f"g({text})", "g('k')") == "HIT"


@pytest.mark.parametrize(
    "expression",
    ["g(a, c.t())", "g(b.t(), a)", "g(a, b.t(), c)", "g(a)", "h(a, b.t())", "g(a, k=b.t())"],
)
def test_a_pattern_does_not_match_another_structure(expression):
    with pytest.raises(DriftError, match=" 0 times"):
        replaced(expression, "g(a, b.t())")


@pytest.mark.parametrize("rest", ["", ", c", ", c, out=d", ", *more, **most"])
def test_an_ellipsis_takes_any_rest_of_the_arguments(rest):
    assert replaced(f"g(a{rest})", "g(a, ...)") == "HIT"


def test_an_ellipsis_does_not_take_the_arguments_before_it():
    with pytest.raises(DriftError):
        replaced("g(b, a)", "g(a, ...)")


def test_a_keyword_of_another_name_does_not_match():
    with pytest.raises(DriftError):
        replaced("g(a, beta=0.0)", "g(a, alpha=0.0)")


# -- counts and scopes -------------------------------------------------------------------------


def test_every_one_of_an_exact_count_is_replaced():
    assert replaced("g(a) + h(g(a))", "g(a)", count=2) == "HIT + h(HIT)"


@pytest.mark.parametrize(("body", "seen"), [("h(a)", 0), ("g(a) + g(a)", 2), ("g(a, g(a))", 1)])
def test_a_count_that_is_off_names_file_scope_pattern_and_both_counts(body, seen):
    edit = ReplaceExpression("f", Anchor("g(a)", 3), "HIT")
    with pytest.raises(DriftError) as caught:
        rewritten(f"def f():\n    return {body}\n", edit)
    text = str(caught.value)
    for part in ("core/x.py, in f:", "`g(a)`", f"{seen} times instead of 3", "the_entry", "1.0"):
        assert part in text


def test_a_look_alike_in_another_class_or_method_stays():
    source = """\
        class One:
            def forward(self):
                return g(a)
            def backward(self):
                return g(a)

        class Two:
            def forward(self):
                return g(a)

        def forward():
            return g(a)
        """
    new = rewritten(source, ReplaceExpression("Two.forward", Anchor("g(a)"), "HIT"))
    assert new.count("g(a)") == 3
    assert "class Two:\n    def forward(self):\n        return HIT" in new


def test_a_match_inside_a_nested_function_of_the_scope_is_found():
    source = "def f():\n    def inner():\n        return g(a)\n    return inner\n"
    assert "return HIT" in rewritten(source, ReplaceExpression("f", Anchor("g(a)"), "HIT"))


def test_without_a_scope_the_whole_module_is_searched():
    source = "x = g(a)\nclass C:\n    def m(self):\n        return g(a)\n"
    assert rewritten(source, ReplaceExpression("", Anchor("g(a)", 2), "HIT")).count("HIT") == 2


@pytest.mark.parametrize("guard", ["if fast:", "try:", "else:", "except Oops:"])
def test_a_function_under_a_condition_is_found(guard):
    before = {"else:": "if slow:\n    pass\n", "except Oops:": "try:\n    pass\n"}.get(guard, "")
    after = "\nfinally:\n    pass\n" if guard == "try:" else "\n"
    source = f"{before}{guard}\n    def f():\n        return g(a){after}"
    assert "HIT" in rewritten(source, ReplaceExpression("f", Anchor("g(a)"), "HIT"))


@pytest.mark.parametrize(
    ("source", "times"),
    [
        ("def other():\n    pass\n", 0),
        ("def f():\n    pass\ndef f():\n    pass\n", 2),
        ("class f:\n    x = 1\n", 0),
        ("def outer():\n    return f()\n", 0),
    ],
)
def test_a_function_that_is_not_there_once_is_named(source, times):
    with pytest.raises(DriftError, match=f"`f` is defined {times} times"):
        rewritten(source, PrependBody("f", "pass\n"))


def test_a_body_on_the_line_of_its_def_is_an_error_of_ours():
    for edit in (PrependBody("f", "pass\n"), InsertBefore("f", (Anchor("g(a)"),), "pass\n")):
        with pytest.raises(DriftError, match="in f:"):
            rewritten("def f(): return g(a)\n", edit)


def test_source_that_is_no_python_is_named():
    with pytest.raises(DriftError, match=r"core/x\.py does not parse"):
        rewritten("def f(:\n", AddImport("import q"))


# -- insertion ---------------------------------------------------------------------------------


# {case: (scope, patterns, source with NEW where the insertion is to stand)}
INSERTIONS = {
    "an expression: before its statement": (
        *("f", ["g(a)"]),
        "def f(a):\n    first()\n    NEW\n    y = 1 + g(a)\n    return y\n",
    ),
    "a statement": ("f", ["x = a + b"], "def f():\n    NEW\n    x=a  +  b\n"),
    "comments stay above": (
        *("f", ["g(a)"]),
        "def f(a):\n    first()\n\n    # About g.\n    NEW\n    g(a)\n",
    ),
    "different branches: once, before the block around them all": (
        *("f", ["g(a)", "g16(a)", "g32(a)"]),
        "def f(a):\n    with context():\n        before()\n        NEW\n        if fused:\n"
        "            if wide:\n                g32(a)\n            else:\n                g16(a)\n"
        "        elif other:\n            x = g(a)\n        after()\n",
    ),
    "one branch: in it": (
        *("f", ["h(a)", "g(a)"]),
        "def f(a):\n    if x:\n        NEW\n        g(a)\n        h(a)\n    return a\n",
    ),
    "a condition: before the whole statement": (
        *("f", ["g(a)"]),
        "def f(a):\n    NEW\n    while g(a):\n        pass\n",
    ),
    "a branch on one line: before it": ("f", ["g(a)"], "def f(a):\n    NEW\n    if x: g(a)\n"),
    "the module: before its first statement with an anchor": (
        *("", ["g(a)", "not a"]),
        "b = 1\nNEW\nif not a:\n    c = 1\ndef f():\n    return g(a)\n",
    ),
}


@pytest.mark.parametrize(("scope", "patterns", "text"), INSERTIONS.values(), ids=INSERTIONS)
def test_an_insertion_stands_before_the_block_that_holds_all_anchors(scope, patterns, text):
    source = re.sub(" *NEW\n", "", text)
    space = re.search("( *)NEW", text)[1]
    edit = InsertBefore(scope, tuple(map(Anchor, patterns)), "new = 1\nmore(new)\n")
    assert rewritten(source.encode(), edit) == text.replace("NEW", f"new = 1\n{space}more(new)")


def test_insertions_at_one_place_keep_the_order_of_the_edits():
    edits = [InsertBefore("f", (Anchor("g(a)"),), f"new_{i} = {i}\n") for i in range(3)]
    new = rewritten("def f(a):\n    # Why.\n    g(a)\n", *edits)
    assert new == "def f(a):\n    # Why.\n    new_0 = 0\n    new_1 = 1\n    new_2 = 2\n    g(a)\n"


def test_inserted_code_is_not_searched_for_later_anchors():
    edits = (
        InsertBefore("f", (Anchor("g(a)"),), "g(a)\n"),
        ReplaceExpression("f", Anchor("g(a)"), "HIT"),
    )
    assert rewritten("def f(a):\n    g(a)\n", *edits) == "def f(a):\n    g(a)\n    HIT\n"


@pytest.mark.parametrize("docstring", ["", '    """Words."""\n'])
def test_a_body_is_prepended_behind_its_docstring(docstring):
    source = f"def f():\n{docstring}    x()\n"
    new = rewritten(source.encode(), PrependBody("f", "if a:\n    return\n"))
    assert new == f"def f():\n{docstring}    if a:\n        return\n    x()\n"


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("a", "a, k: int = 1, v=None"),
        ("self, a: int, b=2", "self, a: int, b=2, k: int = 1, v=None"),
        ("a, b, *rest, c, **more", "a, b, k: int = 1, v=None, *rest, c, **more"),
        ("a, /, b", "a, /, b, k: int = 1, v=None"),
    ],
)
def test_parameters_stand_behind_the_last_positional_one(signature, expected):
    new = rewritten(f"def f({signature}):\n    g(a)\n", AddParameters("f", "k: int = 1, v=None"))
    assert new == f"def f({expected}):\n    g(a)\n"


def test_parameters_of_a_signature_over_lines_have_a_line_each():
    source = "def f(\n    self,\n    a: int = 1,\n) -> None:\n    pass\n"
    new = rewritten(source, AddParameters("f", "k=None, v=None"))
    assert new == source.replace("a: int = 1,\n", "a: int = 1,\n    k=None,\n    v=None,\n")


@pytest.mark.parametrize("own", ["k", "a, *, k=None", "k, /, a"])
def test_a_parameter_that_is_there_already_is_drift(own):
    with pytest.raises(DriftError, match="parameter `k`"):
        rewritten(f"def f({own}):\n    pass\n", AddParameters("f", "k=None"))


def test_a_function_without_parameters_is_drift():
    with pytest.raises(DriftError, match="no positional parameter"):
        rewritten("def f():\n    pass\n", AddParameters("f", "k=None"))


def test_parameters_do_not_hide_other_edits_of_the_function():
    edits = (
        AddParameters("f", "k=None"),
        ReplaceExpression("f", Anchor("g(a)", 2), "HIT"),
        PrependBody("f", "first()\n"),
    )
    new = rewritten("def f(a, b=g(a)):\n    return g(a)\n", *edits)
    assert new == "def f(a, b=HIT, k=None):\n    first()\n    return HIT\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            '"""D."""\nimport a\nimport b\n\nx = 1\n',
            '"""D."""\nimport a\nimport b\nimport q\n\nx = 1\n',
        ),
        ("from __future__ import z\nx = 1\n", "from __future__ import z\nimport q\nx = 1\n"),
        ('"""D."""\nx = 1\n', '"""D."""\nimport q\nx = 1\n'),
        ("# Licence.\n\nx = 1\n", "# Licence.\n\nimport q\nx = 1\n"),
        ("import a", "import a\nimport q"),
        ("import a\nx = 1\nimport b\n", "import a\nimport q\nx = 1\nimport b\n"),
    ],
)
def test_an_import_is_added_behind_the_first_run_of_imports(source, expected):
    assert rewritten(source, AddImport("import q")) == expected


# -- operands ----------------------------------------------------------------------------------


def test_both_operands_of_every_form_are_wrapped_in_place():
    source = """\
        def f(a, w):
            if wide:
                return mm(a, w.t(), out=o)
            return a.mm(w)
        """
    forms = (Anchor("mm(a, w.t(), ...)"), Anchor("a.mm(w)"))
    new = rewritten(source, WrapOperands("f", forms, {"a": "q.lhs", "w": "q.rhs"}))
    assert "mm(q.lhs(a), q.rhs(w).t(), out=o)" in new
    assert "return q.lhs(a).mm(q.rhs(w))" in new


def test_the_function_is_wrapped_and_a_method_of_an_operand_becomes_torchs():
    source = """\
        def f(a, w):
            if wide:
                return k.mm(
                    a, w.t(), out=o
                )
            return a.t().mm(w)
        """
    forms = (Anchor("k.mm(a, w.t(), ...)"), Anchor("a.t().mm(w)"))
    edit = WrapOperands("f", forms, {"a": "q.lhs", "w": "q.rhs"}, "q.product")
    new = rewritten(source, edit)
    assert "q.product(k.mm)(\n            q.lhs(a), q.rhs(w).t(), out=o\n" in new
    assert "return q.product(torch.mm)(q.lhs(a).t(), q.rhs(w))" in new


def test_an_operand_that_occurs_twice_in_a_match_is_refused():
    edit = WrapOperands("f", (Anchor("mm(a, ...)"),), {"a": "q"})
    with pytest.raises(DriftError, match="operand `a` occurs 2 times"):
        rewritten("def f(a):\n    return mm(a, out=a)\n", edit)


def test_a_site_is_inserted_and_wrapped_by_anchors_of_the_same_source():
    anchors = (Anchor("mm(a, b)"),)
    edits = (InsertBefore("f", anchors, "t = 'none'\n"), WrapOperands("f", anchors, {"a": "q"}))
    assert rewritten("def f(a, b):\n    return mm(a, b)\n", *edits) == (
        "def f(a, b):\n    t = 'none'\n    return mm(q(a), b)\n"
    )


# -- versions ----------------------------------------------------------------------------------

FORMS = (Anchor("g(a)", versions="<2"), Anchor("h(a)", versions=">=2"))


@pytest.mark.parametrize(("version", "name"), [("1.9", "g"), ("2.0", "h")])
def test_a_form_is_looked_for_in_the_releases_that_have_it(version, name):
    edit = InsertBefore("f", FORMS, "new = 1\n")
    assert "new = 1" in rewritten(f"def f():\n    {name}(a)\n", edit, version=version)


def test_a_form_that_the_release_must_have_and_has_not_is_drift():
    with pytest.raises(DriftError, match=r"`h\(a\)` occurs 0 times"):
        rewritten("def f():\n    g(a)\n", InsertBefore("f", FORMS, "new = 1\n"), version="2.0")


def test_a_release_in_which_no_form_is_known_is_drift():
    edit = InsertBefore("f", FORMS[:1], "new = 1\n")
    with pytest.raises(DriftError, match="no form"):
        rewritten("def f():\n    g(a)\n", edit, version="2.0")


# -- every other byte --------------------------------------------------------------------------

ODDITIES = {
    "windows line ends": "import a\r\n\r\ndef f():\r\n    g(a)\r\n",
    "tabs": "import a\ndef f():\n\tif x:\n\t\tg(a)\n",
    "two-space indents": "import a\ndef f():\n  g(a)\n",
    "trailing blanks": "import a  \n\t\ndef f():   \n    g(a)   \n    \n",
    "no final newline": "import a\ndef f():\n    g(a)",
    "form feed": "import a\n\x0c\ndef f():\n    g(a)\n",
    "comments in a call": "import a\ndef f():\n    h(  # 1\n        g(a),  # 2\n    )  # 3\n",
    "non-ASCII": "import a\n# ünïcode ∂\ndef f():\n    s = 'é'; g(a)\n",
    "continuation": "import a\ndef f():\n    x = 1 + \\\n        g(a)\n",
}


@pytest.mark.parametrize("source", ODDITIES.values(), ids=ODDITIES)
def test_nothing_but_the_replaced_expression_changes(source):
    edit = ReplaceExpression("f", Anchor("g(a)"), "HIT")
    assert rewritten(source.encode(), edit) == source.replace("g(a)", "HIT")


@pytest.mark.parametrize("source", ODDITIES.values(), ids=ODDITIES)
def test_the_lines_before_an_insertion_and_behind_it_keep_their_bytes(source):
    edits = (AddImport("import q"), PrependBody("f", "if y:\n    new = 1\n"))
    new = rewritten(source.encode(), *edits).splitlines(keepends=True)
    added = [line for line in new if line.strip() in ("import q", "if y:", "new = 1")]
    assert len(added) == 3
    assert "".join(line for line in new if line not in added) == source
    assert {line.endswith("\r\n") for line in added} == {"\r\n" in source}


def test_a_byte_order_mark_is_kept():
    source = b"\xef\xbb\xbfimport a\ndef f():\n    g(a)\n"
    new = rewrite(
        source,
        FileEdits("core/x.py", (ReplaceExpression("f", Anchor("g(a)"), "HIT"),)),
        "1.0",
        "the_entry",
    )
    assert new == source.replace(b"g(a)", b"HIT")


NAMES = st.sampled_from(["a", "b", "g(a)", "x.y", "'s'", "[1,  2]", "h( a )", "(a,)"])
LINES = st.builds("{} = {}{}".format, st.sampled_from("xyz"), NAMES, st.sampled_from(["", "  # c"]))


@given(st.lists(LINES, min_size=1), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_replacing_and_replacing_back_gives_the_same_bytes(lines, ending, final):
    body = ending.join(f"    {line}" for line in ["mark(0)", *lines]) + (ending if final else "")
    source = f"def f():{ending}{body}".encode()
    there = ReplaceExpression("f", Anchor("mark(0)"), "other(1)")
    back = ReplaceExpression("f", Anchor("other(1)"), "mark(0)")
    changed = rewritten(source, there).encode()
    assert changed == source.replace(b"mark(0)", b"other(1)")
    assert rewritten(changed, back).encode() == source
