"""Trees that were patched by hand as the script system's were, in words of our own.

Their layers apply an autograd function of their own, beside upstream's; `if` and `elif` choose the
product. The later tree also logs tensors, lets attention share a literal, and computes no type for
the weight gradient; the last one may take its types from a manager.
"""

import pytest
from mqo.errors import OverlayError
from mqo.overlay.quant_types import modifier

from .lookalike import ATTENTION, LAYERS, LINEAR, layers, method, read, write

CHOICE = """\
if custom_quant_type == 'mxfp4':
    {0} = mx_matmul({1}, {2}, 'e2m1').to(dtype)
elif custom_quant_type == 'hifp8':
    {0} = hif_matmul({1}, {2}).to(dtype)
else:
    {0} = torch.matmul({1}, {2})
"""
Y = CHOICE.format("y", "total_input", "weight.t()")
DX = CHOICE.format("dx", "grad_output", "weight")
DW = CHOICE.format("dw", "grad_output.t()", "total_input")
S = CHOICE.format("s", "query", "key")
C = CHOICE.format("c", "attention_probs", "value")
PROBABILITIES = "attention_probs = self.dropout(self.softmax(s.view(shape)))\n"
FUSED = "fused.wgrad_gemm_accumulate(total_input, grad_output, weight.main_grad)\n"
DUMP = "dump_linear(tensor=grad_output, weight=weight, quant_type=custom_quant_type)\n"
APPLY = """
def run_own(*operands):
    return Own.apply(*operands)

def run_frozen(*operands):
    return Frozen.apply(*operands)

class ColumnParallelLinear(Module):
    def __init__(self):
        self.run = run_own if self.quantizes else multiply

    def forward(self, x):
        run = self.run if self.weight.requires_grad else run_frozen
        return run(x, self.weight)
"""


def literal(value):
    return f"custom_quant_type = '{value}'  #!\n"


def indented(text):
    return "".join(f"    {line}\n" for line in text.splitlines())


def linear(forward, backward):
    """A file with upstream's class, a frozen layer's, and `Own`, which has these methods."""
    plain = layers(
        "return torch.matmul(total_input, weight.t())\n",
        "dx = grad_output.matmul(weight)\nreturn dx, grad_output.t().matmul(total_input)\n",
    )
    frozen = method("backward", "ctx, grad_output", "return grad_output.matmul(ctx.weight)\n")
    parts = [
        plain,
        f"\nclass Frozen(Function):\n{frozen}",
        "\nclass Own(Function):\n",
        method("forward", "ctx, input, weight", forward),
        method("backward", "ctx, grad_output", backward),
    ]
    return "".join(parts) + APPLY


def attend(body):
    """A file with this body of attention's `forward`."""
    return "class DotProductAttention:\n" + method("forward", "self, query, key, value", body)


def weight_gradient(product):
    return f"if ctx.fuses:\n    {FUSED}    dw = None\nelse:\n{indented(product)}return dx, dw\n"


FIRST = {
    LAYERS: linear(
        literal("hifp8") + Y + "return y\n",
        literal("hifp8") + DX + weight_gradient(literal("bf16") + DW),
    ),
    ATTENTION: attend(
        literal("hifp8") + S + PROBABILITIES + literal("hifp8") + C + "return c.view(shape)\n"
    ),
}
LOGS = "if ctx.logs:\n" + indented(literal("hifp8") + DUMP)
SHARING = S + PROBABILITIES + C + "return c.view(shape)\n"
SECOND = {
    LAYERS: linear(
        literal("hifp8") + Y + "return y\n",
        LOGS + literal("hifp8") + DX + weight_gradient("dw = plain_matmul(grad_output.t(), input)"),
    ),
    ATTENTION: attend(literal("hifp8") + SHARING),
}
MANAGED = "custom_quant_type = {}.manager.type()\n"
THIRD = {
    LAYERS: linear(
        literal("mxfp8")
        + f"if hasattr(ctx, 'manager'):\n    {MANAGED.format('ctx')}"
        + Y
        + "return y\n",
        LOGS + literal("mxfp8") + DX + weight_gradient("dw = plain_matmul(grad_output.t(), input)"),
    ),
    ATTENTION: attend(
        literal("mxfp8")
        + f"try:\n    import m\n    {MANAGED.format('self')}except ImportError:\n    pass\n"
        + SHARING
    ),
}


def lines(tree, path):
    """The lines of the literals of a file, in source order."""
    return [n for n, text in enumerate(tree[path].splitlines(), 1) if text.endswith("#!")]


@pytest.fixture
def root(tmp_path):
    def make(tree):
        return write(tmp_path / "tree", tree)

    return make


def shown(root):
    return {s.site.name: (s.type, s.site.line) for s in modifier.check(root).sites}


def test_the_function_that_the_layers_apply_holds_the_linear_sites(root):
    fprop, dgrad, wgrad = lines(FIRST, LAYERS)
    qk, pv = lines(FIRST, ATTENTION)
    report = modifier.check(root(FIRST))
    assert {s.site.name: (s.type, s.site.line) for s in report.sites} == {
        "fprop": ("hifp8", fprop),
        "dgrad": ("hifp8", dgrad),
        "wgrad": ("none", wgrad),
        "qk": ("hifp8", qk),
        "pv": ("hifp8", pv),
    }
    assert report.sites[2].unknown == ("bf16",)
    assert report.due == ()
    (note,) = report.notes
    assert note.startswith(f"{LAYERS}:3 ({LINEAR})")


@pytest.mark.parametrize("tree", [SECOND, THIRD])
def test_a_literal_that_a_logging_call_reads_is_no_site_and_due(root, tree):
    _, logged, dgrad = lines(tree, LAYERS)
    report = modifier.check(root(tree))
    assert shown(root(tree))["dgrad"][1] == dgrad
    assert shown(root(tree))["wgrad"][0] is None
    assert report.due[0] == (
        f"{LAYERS}:{logged} is a literal that no GEMM of a site reads, and wgrad has none"
    )


def test_a_type_that_a_manager_may_set_is_shown_and_due(root):
    fprop, *_ = lines(THIRD, LAYERS)
    (scores,) = lines(THIRD, ATTENTION)
    found = shown(root(THIRD))
    assert (found["fprop"], found["qk"], found["pv"]) == (
        ("mxfp8", fprop),
        ("mxfp8", scores),
        ("mxfp8", scores),
    )
    assert len(modifier.check(root(THIRD)).due) == 4


# Which of a file's literals an option sets; None where it is refused.
SETS = [
    (FIRST, {"fprop": 0, "dgrad": 1, "wgrad": 2, "qk": 0, "pv": 1}),
    (SECOND, {"fprop": 0, "dgrad": 2, "wgrad": None, "qk": None, "pv": None}),
    (THIRD, {"fprop": None, "dgrad": 2, "wgrad": None, "qk": None, "pv": None}),
]


@pytest.mark.parametrize(
    ("tree", "site", "index"),
    [(tree, site, index) for tree, sites in SETS for site, index in sites.items()],
)
def test_an_option_changes_the_right_line_or_is_refused_with_file_and_line(root, tree, site, index):
    made = root(tree)
    before = read(made)
    path = ATTENTION if site in ("qk", "pv") else LAYERS
    if index is None:
        with pytest.raises(OverlayError, match=rf"^{path}:\d+ "):
            modifier.modify(made, {site: "mxfp4"})
        assert read(made) == before
        return
    modifier.modify(made, {site: "mxfp4"})
    pairs = zip(before[path].splitlines(), read(made)[path].splitlines(), strict=True)
    changed = [n for n, (old, new) in enumerate(pairs, 1) if old != new]
    assert changed == [lines(tree, path)[index]]
    modifier.restore(made)
    assert read(made) == before


def test_attentions_one_literal_is_set_for_both_when_that_is_asked_for(root):
    made = root(SECOND)
    before = read(made)
    modifier.modify(made, {"pv": "mxfp4"}, shared=True)
    assert shown(made)["qk"] == shown(made)["pv"] == ("mxfp4", lines(SECOND, ATTENTION)[0])
    modifier.restore(made)
    assert read(made) == before


# -- which class it is -------------------------------------------------------------------------


def test_an_inherited_forward_counts(root):
    text = FIRST[LAYERS].replace(
        "run_own(*operands):\n    return Own", "run_own(*o):\n    return New"
    )
    text = text.replace("\ndef run_own", "\nclass New(Own):\n    pass\n\ndef run_own")
    assert shown(root(FIRST | {LAYERS: text})) == shown(root(FIRST))


def test_a_layer_may_apply_by_another_name(root):
    text = FIRST[LAYERS].replace("return Own.apply(*operands)", "return chosen(*operands)")
    text = text.replace("\ndef run_own", "\nchosen = Own.apply\n\ndef run_own")
    assert next(s[0] for s in shown(root(FIRST | {LAYERS: text})).values()) == "hifp8"


def test_a_file_without_layers_has_what_its_linear_functions_apply(root):
    text = FIRST[LAYERS].partition("\nclass ColumnParallelLinear")[0]
    text = text.partition("\nclass RowParallelLinear")[0] + text.partition("x, self.weight)\n")[2]
    made = root(FIRST | {LAYERS: text.replace("run_own", "own_linear_with_types")})
    assert shown(made)["fprop"] == ("hifp8", lines({LAYERS: text}, LAYERS)[0])
    report = modifier.check(root(FIRST | {LAYERS: text.partition("\ndef run_own")[0]}))
    assert [state.type for state in report.sites[:3]] == ["hifp8", "hifp8", "none"]


def test_a_function_that_no_layer_applies_holds_no_site(root):
    text = FIRST[LAYERS].replace("return Own.apply", "return elsewhere.apply")
    report = modifier.check(root(FIRST | {LAYERS: text}))
    assert [state.site.note for state in report.sites[:3]] == ["absent"] * 3
    assert len(report.due) == 3
    assert all("and fprop and dgrad and wgrad have none" in due for due in report.due)


def test_two_functions_with_literals_are_refused(root):
    text = FIRST[LAYERS].replace(
        "return torch.matmul(total_input",
        literal("none") + " " * 8 + "return typed_matmul(custom_quant_type, total_input",
        1,
    )
    made = root(FIRST | {LAYERS: text})
    with pytest.raises(OverlayError, match=rf"^{LAYERS}:\d+ \(Own\) .* line \d+"):
        modifier.modify(made, {"fprop": "mxfp4"})


def test_literals_in_a_frozen_layer_alone_are_refused(root):
    text = FIRST[LAYERS].replace("#!", "").replace("custom_quant_type =", "other =")
    body = "return grad_output.matmul(ctx.weight)"
    typed = (
        f"{literal('none')}        return typed_matmul(grad_output, ctx.weight, custom_quant_type)"
    )
    text = text.replace(body, typed)
    made = root(FIRST | {LAYERS: text.replace("if custom_quant_type", "if other")})
    due = modifier.check(made).due
    assert any("may hold the sites as well as" in reason for reason in due)


# -- GEMMs in helpers of the file, as upstream's main has them -----------------------------------

HELPERS = """
def _linear_forward(input, weight, bias, dtype, quant_type=None):
    if quant_type == 'hifp8':
        return hif_matmul(input, weight.t())
    return torch.matmul(input, weight.t())

def _wgrad_gemm(out, grad_output, total_input, quant_type=None):
    torch.matmul(grad_output.t(), total_input, out=out)
    return out

"""
HELPED_Y = """\
if custom_quant_type == 'hifp8':
    return hif_linear_forward(total_input, weight, bias, dtype)
return _linear_forward(total_input, weight, bias, dtype)
"""
HELPED_DX = """\
input, weight = ctx.saved_tensors
sharded = weight
weight = sharded.gather()
grad_output_2d = grad_output.reshape(-1, grad_output.size(-1))
if custom_quant_type == 'hifp8':
    grad_output_2d, weight = hif_pair(grad_output_2d, weight)
dx = grad_output_2d.matmul(weight).view_as(input)
"""
HELPED_DW = """\
dw = None
if ctx.fuses:
    _wgrad_gemm(weight.main_grad, grad_output, total_input, custom_quant_type)
elif ctx.widens:
    dw = _wgrad_gemm(sharded.get_wgrad_tensor(), grad_output, total_input, custom_quant_type)
elif ctx.copies:
    dw = sharded.get_wgrad_tensor()
    if custom_quant_type == 'hifp8':
        total_input = hif_cast(total_input)
    torch.matmul(grad_output.t(), total_input, out=dw)
else:
    dw = typed_matmul(grad_output.t(), total_input, custom_quant_type)
return dx, dw
"""
HELPED = FIRST | {
    LAYERS: HELPERS
    + linear(
        literal("hifp8") + HELPED_Y,
        literal("mxfp8") + HELPED_DX + literal("none") + HELPED_DW,
    )
}


@pytest.mark.parametrize(("site", "index"), [("fprop", 0), ("dgrad", 1), ("wgrad", 2)])
def test_a_literal_before_calls_of_helpers_is_the_one_that_their_operands_tell(root, site, index):
    made = root(HELPED)
    assert shown(made)[site][1] == lines(HELPED, LAYERS)[index]
    assert modifier.check(made).due == ()
    (edit,) = modifier.modify(made, {site: "mxfp4"}).edits
    assert (edit.site, edit.line) == (site, lines(HELPED, LAYERS)[index])


def test_a_literal_inside_a_helper_is_no_sites_and_due(root):
    typed = f"    {literal('hifp8')}    if custom_quant_type == 'hifp8':\n"
    text = HELPED[LAYERS].replace("    if quant_type == 'hifp8':\n", typed, 1)
    text = text.replace(literal("hifp8") + " " * 8 + "if", "if", 1)
    made = root(HELPED | {LAYERS: text})
    inside = lines({LAYERS: text}, LAYERS)[0]
    assert modifier.check(made).due == (
        f"{LAYERS}:{inside} is a literal that no GEMM of a site reads, and fprop has none",
    )
    with pytest.raises(OverlayError, match="no literal for the GEMM of fprop"):
        modifier.modify(made, {"fprop": "mxfp4"})


def test_a_literal_that_a_gemm_of_unknown_operands_reads_too_is_refused(root):
    more = "dx = dx + typed_matmul(ctx.low, ctx.rank, custom_quant_type)\n"
    text = HELPED[LAYERS].replace("        dw = None\n", " " * 8 + more + "        dw = None\n", 1)
    made = root(HELPED | {LAYERS: text})
    with pytest.raises(OverlayError, match=rf"^{LAYERS}:\d+ .* literal of wgrad, "):
        modifier.modify(made, {"wgrad": "mxfp4"})
    assert shown(made)["dgrad"] == ("mxfp8", lines({LAYERS: text}, LAYERS)[1])
