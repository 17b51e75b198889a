"""What a GEMM reads of the variable, at the statements `use()`: lines, by hand."""

import textwrap

import pytest
from mqo.overlay.literals import Literal, Source
from mqo.overlay.quant_types.gemms import ATTEND, find_gemms

USE = "weight.grad.add_(mm(query, custom_quant_type))"


def reaching(body, arguments=""):
    """For every `use()`: the lines of the literals that it reads, and what else sets the type.

    The latter are negative lines. The body starts on line 1: the function's head is line 0.
    """
    text = f"def f({arguments}):\n" + textwrap.indent(textwrap.dedent(body).lstrip("\n"), "    ")
    source = Source.parse(text.replace("use()", USE).encode())
    (function,) = source.tree.body
    lines = [
        {t.line - 1 if isinstance(t, Literal) else 1 - t for t in gemm.reads}
        for gemm in find_gemms(function, ATTEND, source)
    ]
    return [sorted(read) for read in lines]


def test_a_later_literal_takes_the_place_of_an_earlier_one():
    body = """
        use()
        custom_quant_type = 'a'
        use()
        custom_quant_type = 'b'
        use()
    """
    assert reaching(body) == [[], [2], [4]]


def test_a_literal_holds_to_the_end_of_its_block_and_is_not_known_behind_it():
    body = """
        custom_quant_type = 'a'
        if x:
            custom_quant_type = 'b'
            use()
        elif y:
            use()
        else:
            custom_quant_type = 'c'
            use()
        use()
        custom_quant_type = 'd'
        use()
    """
    behind = [-8, -3, 1, 3, 8]
    assert reaching(body) == [[3], [-3, 1, 3], [8], behind, [11]]


def test_a_block_that_sets_nothing_changes_nothing():
    body = """
        custom_quant_type = 'a'
        for x in y:
            try:
                use()
            finally:
                use()
        use()
    """
    assert reaching(body) == [[1], [1], [1]]


@pytest.mark.parametrize("end", ["return", "raise X"])
def test_what_a_branch_that_leaves_has_set_is_not_known_behind_it(end):
    body = f"""
        custom_quant_type = 'a'
        if x:
            custom_quant_type = 'b'
            {end}
        use()
    """
    assert reaching(body) == [[-3, 1, 3]]


@pytest.mark.parametrize("head", ["for x in y", "while x"])
def test_the_body_of_a_loop_may_have_run_before(head):
    body = f"""
        custom_quant_type = 'a'
        {head}:
            use()
            custom_quant_type = 'b'
            use()
        else:
            use()
        use()
    """
    assert reaching(body) == [[-4, 1, 4], [4], [-4, 1, 4], [-4, 1, 4]]


def test_a_handler_may_follow_any_part_of_its_try():
    body = """
        custom_quant_type = 'a'
        try:
            custom_quant_type = 'b'
            use()
        except E:
            use()
        use()
    """
    assert reaching(body) == [[3], [-3, 1, 3], [-3, 1, 3]]


def test_a_with_is_no_branch_and_a_match_is():
    body = """
        custom_quant_type = 'a'
        with x:
            custom_quant_type = 'b'
            use()
        match x:
            case 1:
                custom_quant_type = 'c'
            case 2:
                use()
        use()
    """
    assert reaching(body) == [[3], [-7, 3, 7], [-7, 3, 7]]


@pytest.mark.parametrize(
    "statement",
    [
        "custom_quant_type = os.environ['T']",
        "custom_quant_type = custom_quant_type.lower()",
        "custom_quant_type += 'x'",
        "x, custom_quant_type = 1, 'b'",
        "x = (custom_quant_type := 'b')",
        "with x as custom_quant_type: pass",
        "custom_quant_type: str = f()",
        "del custom_quant_type",
    ],
)
def test_whatever_sets_the_variable_overwrites_a_literal(statement):
    assert reaching(f"custom_quant_type = 'a'\n{statement}\nuse()\n") == [[-2]]


@pytest.mark.parametrize(
    ("statement", "lines"),
    [
        ("for custom_quant_type in x: use()", [-2]),
        ("if (custom_quant_type := x): use()", [-2]),
        ("custom_quant_type.x = 1; use()", [1]),
        ("self.custom_quant_type = 1; use()", [1]),
        ("f(custom_quant_type=1); use()", [1]),
        ("x: custom_quant_type = 1; use()", [1]),
    ],
)
def test_within_a_line(statement, lines):
    assert reaching(f"custom_quant_type = 'a'\n{statement}\n") == [lines]


@pytest.mark.parametrize(
    "statement",
    [
        "import a as custom_quant_type",
        "from a import custom_quant_type",
        "global custom_quant_type",
        "def custom_quant_type(): ...",
        "def g():\n  nonlocal custom_quant_type\n  custom_quant_type = 'b'",
        "def g(custom_quant_type):\n  pass",
        "def g(x):\n  return cast(x, custom_quant_type)",
        "g = lambda x: cast(x, custom_quant_type)",
        "try:\n  x\nexcept E as custom_quant_type:\n  x",
        "match x:\n  case [custom_quant_type]:\n    x",
        "match x:\n  case {**custom_quant_type}:\n    x",
        "match x:\n  case [*custom_quant_type]:\n    x",
    ],
)
def test_what_sets_the_variable_in_an_odd_way_or_reads_it_later_is_never_known(statement):
    use = f"use()\n{statement}\ncustom_quant_type = 'b'\nuse()"
    first, second = reaching(f"custom_quant_type = 'a'\n{use}\n")
    assert first[0] < 0
    assert second[0] < 0


def test_a_parameter_of_that_name_is_no_literal():
    assert reaching("use()", arguments="custom_quant_type='a'") == [[]]
    assert reaching("custom_quant_type = 'a'\nuse()", arguments="*, custom_quant_type") == [[0, 1]]
