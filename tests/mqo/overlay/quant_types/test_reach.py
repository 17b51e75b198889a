"""What may be in the variable at the statements `use(...)`: their lines, by hand."""

import ast
import textwrap

import pytest
from mqo.overlay.quant_types.plain import Source
from mqo.overlay.quant_types.reach import steps


def reaching(body, arguments=""):
    """For every reached `use(...)`: the lines of what reaches it, negative for no plain literal.

    The body starts on line 1: the function's head is line 0.
    """
    text = f"def f({arguments}):\n" + textwrap.indent(textwrap.dedent(body).lstrip("\n"), "    ")
    source = Source.parse("x.py", text.encode())
    (function,) = source.tree.body
    found = []
    for step in steps(function, source):
        match step.statement:
            case ast.Expr(value=ast.Call(func=ast.Name(id="use"))):
                lines = (d.line - 1 if d.literal else 1 - d.line for d in step.reaching)
                found.append(sorted(lines, key=abs))
    return found


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
        "del custom_quant_type",
        "x = (custom_quant_type := 'b')",
        "import a as custom_quant_type",
        "from a import custom_quant_type",
        "global custom_quant_type",
        "def custom_quant_type(): ...",
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


def test_a_name_for_an_exception_and_one_in_a_pattern_set_it():
    handler = "try:\n  x\nexcept E as custom_quant_type:\n  use()\n"
    assert reaching("custom_quant_type = 'a'\n" + handler) == [[-4]]
    for pattern in ("[custom_quant_type]", "{**custom_quant_type}", "[*custom_quant_type]"):
        match = f"match x:\n  case {pattern}:\n    use()\n"
        ((line,),) = reaching("custom_quant_type = 'a'\n" + match)
        assert line < 0


def test_a_parameter_of_that_name_is_no_literal():
    assert reaching("use()", arguments="custom_quant_type='a'") == [[0]]
    assert reaching("custom_quant_type = 'a'\nuse()", arguments="*, custom_quant_type") == [[1]]


def test_a_function_inside_sees_the_literal():
    assert reaching("custom_quant_type = 'a'\ndef g(x):\n  use()\nuse()\n") == [[1], [1]]


@pytest.mark.parametrize(
    "own", ["def g(custom_quant_type):\n ", "def g():\n  custom_quant_type = 'b'\n "]
)
def test_a_variable_of_the_function_inside_is_another_one(own):
    assert reaching(f"custom_quant_type = 'a'\n{own} use()\nuse()\n") == [[1]]


def test_a_function_inside_that_sets_the_outer_variable_may_have_been_called():
    body = """
        custom_quant_type = 'a'
        def g():
            nonlocal custom_quant_type
            custom_quant_type = 'b'
        use()
    """
    assert reaching(body) == [[1, -3]]
