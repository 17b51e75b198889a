"""Hand-made sites that are taken out of a file, and those that are refused."""

import ast

import pytest
from mqo.errors import OverlayError
from mqo.overlay.quant_types.by_hand import files_by_hand, plain
from mqo.overlay.quant_types.sites import ATTENTION, LAYERS
from mqo.overlay.tree import Tree

from ..conftest import commit_all
from . import lookalike

BARE = """\
import torch


class Product(Function):
    def forward(ctx, x, w):
        'Multiply.'
        y = torch.matmul(
            x,  # rows
            w.t(),
        )
        return y


def multiply(*operands):
    return Product.apply(*operands)


multiply.warned = False


class Layer:
    forward = multiply
"""
STATEMENT = """\
        y = torch.matmul(
            x,  # rows
            w.t(),
        )
"""
SITE = """\
        from made.here import round4, round8
        import made.there
        custom_quant_type = 'mxfp8'
        # A comment of the fork.
        if custom_quant_type == 'mxfp4':
            y = round4(x, w.t())
        elif custom_quant_type == 'mxfp8':
            y = made.there.product(
                round8(x), w.t()
            )
        else:
            y = torch.matmul(
                x,  # rows
                w.t(),
            )
"""
COMMENT = "        # A comment of the fork.\n"
BY_HAND = BARE.replace(STATEMENT, SITE)


def cleaned(text):
    content, cuts = plain("a/file.py", text.encode())
    return content, [(cut.first, cut.last) for cut in cuts]


def test_a_chain_becomes_its_else_and_all_else_stays():
    content, cuts = cleaned(BY_HAND)
    assert content.decode() == BARE.replace(STATEMENT, COMMENT + STATEMENT)
    assert cuts == [(7, 7), (8, 8), (9, 9), (11, 21)]


@pytest.mark.parametrize("change", [lambda t: t.replace("\n", "\r\n"), lambda t: "\ufeff" + t])
def test_line_ends_and_marks_stay(change):
    content, _ = cleaned(change(BY_HAND))
    assert content.decode() == change(BARE.replace(STATEMENT, COMMENT + STATEMENT))


def test_tabs_stay():
    content, _ = cleaned(BY_HAND.replace("    ", "\t"))
    assert content.decode() == BARE.replace(STATEMENT, COMMENT + STATEMENT).replace("    ", "\t")


def test_a_chain_may_return():
    site = "if custom_quant_type == 'mxfp4':\n  return a\n else:\n  return b\n"
    content, _ = cleaned(f"def f(a, b):\n custom_quant_type = 'none'\n {site}")
    assert content == b"def f(a, b):\n return b\n"


@pytest.fixture
def with_inner_import():
    """The file, with the import of round4 in its branch instead of before the literal."""
    text = BY_HAND.replace("import round4, round8", "import round8")
    branch = "            y = round4(x, w.t())\n"
    return text.replace(branch, f"            from made.here import round4\n{branch}")


def test_an_import_in_a_branch_goes(with_inner_import):
    content, _ = cleaned(with_inner_import)
    assert content.decode() == BARE.replace(STATEMENT, COMMENT + STATEMENT)


def test_an_import_in_a_branch_that_is_read_elsewhere_is_refused(with_inner_import):
    with pytest.raises(OverlayError) as error:
        cleaned(with_inner_import.replace("        return y\n", "        return round4(y)\n"))
    assert error.value.found.startswith("a/file.py:23 uses round4 ")


def test_an_import_that_is_read_elsewhere_stays():
    text = BY_HAND.replace("        return y\n", "        return round8(y)\n")
    content, _ = cleaned(text)
    assert b"from made.here import round4, round8\n" in content
    assert b"import made.there" not in content


def test_a_file_without_sites_stays():
    assert cleaned(BARE) == (BARE.encode(), [])


def copied(site=SITE):
    """The file, whose layer reads a copy of the class and of the function, with the site."""
    head, end = BARE.split("class Layer")
    copy = head.replace("import torch\n\n\n", "").replace(STATEMENT, site)
    copy = copy.replace("Product", "Rounded").replace("multiply", "multiply_rounded")
    copy = copy.replace("Multiply.", "Round and multiply.")
    return f"{head}{copy}class Layer{end}".replace("= multiply\n", "= multiply_rounded\n")


def test_a_copy_that_holds_the_site_goes_and_its_readers_read_the_original():
    content, _ = cleaned(copied())
    assert ast.dump(ast.parse(content)) == ast.dump(ast.parse(BARE))


def test_definitions_that_are_equal_without_sites_stay():
    twice = "def first():\n    return 1\n\n\ndef second():\n    return 1\n"
    assert cleaned(twice) == (twice.encode(), [])
    content, cuts = cleaned(f"{BY_HAND}\n\n{twice}")
    assert content.decode().endswith(twice)
    assert len(cuts) == 4


def test_a_copy_that_also_differs_elsewhere_stays():
    content, _ = cleaned(copied(SITE + "        y = y + 1\n"))
    assert b"class Rounded" in content
    assert b"= multiply_rounded\n" in content
    assert b"custom_quant_type" not in content


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("        if custom_q", "        x = x + 1\n        if custom_q", 9),
        ("            y = round4(x, w.t())\n", "            z = round4(x, w.t())\n", 12),
        ("            y = round4(x, w.t())\n", "            y = 1\n            y = 2\n", 11),
        ("        return y\n", "        return y, custom_quant_type\n", 22),
        ("'mxfp8'\n        #", "'mxfp8'\n        print(custom_quant_type)\n        #", 9),
    ],
)
def test_another_form_is_refused_with_its_line(old, new, line):
    assert old in BY_HAND
    with pytest.raises(OverlayError) as error:
        cleaned(BY_HAND.replace(old, new, 1))
    assert error.value.found.startswith(f"a/file.py:{line} ")


def test_a_chain_without_else_is_refused():
    text = BY_HAND[: BY_HAND.index("        else:")] + "        return y\n"
    with pytest.raises(OverlayError, match=r"a/file\.py:13 "):
        cleaned(text)


@pytest.mark.usefixtures("plain_git")
def test_only_what_head_holds_is_made_by_hand(tmp_path):
    release = {"megatron/core/package_info.py": "MAJOR = 0\nMINOR = 19\nPATCH = 2\n"}
    files = {LAYERS: lookalike.layers(), ATTENTION: "x = 1\n"} | release
    lookalike.write(tmp_path, files)
    commit_all(tmp_path)
    (tmp_path / ATTENTION).write_text(lookalike.attention())
    assert files_by_hand(Tree(tmp_path)) == [LAYERS]
