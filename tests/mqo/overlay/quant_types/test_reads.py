"""What a GEMM reads of the variable, at the statements `use()`: lines, by hand."""

import textwrap

import pytest
from mqo.overlay.literals import Source
from mqo.overlay.quant_types.gemms import ATTEND, find_gemms

USE = "weight.grad.add_(mm(query, custom_quant_type))"


def reaching(body, arguments=""):
    """For every reached `use()`: the lines of what it reads, negative for no plain literal.

    The body starts on line 1: the function's head is line 0.
    """
    text = f"def f({arguments}):\n" + textwrap.indent(textwrap.dedent(body).lstrip("\n"), "    ")
    source = Source.parse(text.replace("use()", USE).encode())
    (function,) = source.tree.body
    found = find_gemms(function, ATTEND, source)
    lines = [[d.line - 1 if d.literal else 1 - d.line for d in gemm.reads] for gemm in found]
    return [sorted(read, key=abs) for read in lines]


def test_a_later_literal_takes_the_place_of_an_earlier_one():
    body = """
        use()
        custom_quant_type = 'a'
        use()
        custom_quant_type = 'b'
        use()
    """
    assert reaching(body) == [[], [2], [4]]


def test_branches_join():
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
    """
    assert reaching(body) == [[3], [1], [1, 3, 8]]


def test_both_branches_replace_what_was_before():
    body = """
        custom_quant_type = 'a'
        if x:
            custom_quant_type = 'b'
        else:
            custom_quant_type = 'c'
        use()
    """
    assert reaching(body) == [[3, 5]]


@pytest.mark.parametrize("end", ["return", "raise X"])
def test_a_branch_that_leaves_does_not_reach_what_follows(end):
    body = f"""
        custom_quant_type = 'a'
        if x:
            custom_quant_type = 'b'
            {end}
        use()
    """
    assert reaching(body) == [[1]]


def test_what_follows_a_return_is_not_reached():
    assert reaching("custom_quant_type = 'a'\nreturn\nuse()\n") == []


@pytest.mark.parametrize("head", ["for x in y", "while x"])
def test_the_body_of_a_loop_may_have_run_before(head):
    body = f"""
        custom_quant_type = 'a'
        {head}:
            use()
            custom_quant_type = 'b'
            if x:
                break
        else:
            use()
        use()
    """
    assert reaching(body) == [[1, 4], [1, 4], [1, 4]]


def test_a_handler_may_follow_any_part_of_its_try():
    body = """
        custom_quant_type = 'a'
        try:
            use()
            custom_quant_type = 'b'
        except E:
            use()
            custom_quant_type = 'c'
        else:
            use()
        finally:
            use()
        use()
    """
    assert reaching(body) == [[1], [1, 4], [4], [4, 7], [4, 7]]


def test_a_with_and_a_match_are_walked():
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
    assert reaching(body) == [[3], [3], [3, 7]]


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
        "del custom_quant_type",
        "import a as custom_quant_type",
        "from a import custom_quant_type",
        "global custom_quant_type",
        "def custom_quant_type(): ...",
        "def g():\n  nonlocal custom_quant_type\n  custom_quant_type = 'b'",
        "try:\n  x\nexcept E as custom_quant_type:\n  x",
        "match x:\n  case [custom_quant_type]:\n    x",
        "match x:\n  case {**custom_quant_type}:\n    x",
        "match x:\n  case [*custom_quant_type]:\n    x",
    ],
)
def test_what_sets_the_variable_in_an_odd_way_may_do_so_anywhere(statement):
    ((literal, odd),) = reaching(f"custom_quant_type = 'a'\n{statement}\nuse()\n")
    assert literal == 1
    assert odd < 0


def test_a_parameter_of_that_name_is_no_literal():
    assert reaching("use()", arguments="custom_quant_type='a'") == [[0]]
    assert reaching("custom_quant_type = 'a'\nuse()", arguments="*, custom_quant_type") == [[1]]


def test_a_function_inside_sees_the_literal():
    assert reaching("custom_quant_type = 'a'\ndef g(x):\n  use()\nuse()\n") == [[1], [1]]


def test_a_variable_of_the_function_inside_is_another_one():
    body = "custom_quant_type = 'a'\ndef g():\n  custom_quant_type = 'b'\n  use()\nuse()\n"
    assert reaching(body) == [[3], [1]]
    body = "custom_quant_type = 'a'\ndef g(custom_quant_type):\n  use()\nuse()\n"
    assert reaching(body) == [[-2], [1]]
