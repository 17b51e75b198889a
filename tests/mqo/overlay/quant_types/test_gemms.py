import textwrap

import pytest
from mqo.overlay.quant_types.gemms import METHODS, events
from mqo.overlay.quant_types.plain import Source
from mqo.overlay.quant_types.reach import steps

FORWARD, BACKWARD, ATTENTION = METHODS


def found(method, body):
    """(kind, site) of what happens in a method of this body."""
    text = "def f():\n" + textwrap.indent(textwrap.dedent(body).lstrip("\n"), "    ")
    source = Source.parse("x.py", text.encode())
    (function,) = source.tree.body
    return [(event.kind, event.site) for event in events(method, steps(function, source))]


@pytest.mark.parametrize(
    "call",
    [
        "torch.matmul(query, key)",
        "torch.baddbmm(buffer, query, key)",
        "mx_bmm(query, key.t())",
        "quant.hif8.gemm(query, key)",
        "query @ key.t()",
        "torch.einsum('ab,cb->ac', query, key)",
        "F.linear(query, key)",
        "te_general_gemm(query, key)",
        "fp4_mm(query, key)",
        "product(query, key, custom_quant_type)[1:]",
        "product(query, key, quant_type=custom_quant_type)",
    ],
)
def test_what_is_a_gemm(call):
    assert ("gemm", "qk") in found(ATTENTION, f"x = {call}")


@pytest.mark.parametrize(
    "call",
    [
        "query + key",
        "torch.softmax(query, key)",
        "cast(query, custom_quant_type)",
        "torch.matmul(a, b)",
        "torch.matmul(a.view(query.shape), b.to(key.dtype))",
        "self.common(query, key)",
        "summary(query, key)",
    ],
)
def test_what_is_none_or_nobodys(call):
    assert all(kind == "use" for kind, _ in found(ATTENTION, f"x = {call}"))


@pytest.mark.parametrize(
    ("method", "code", "site"),
    [
        (FORWARD, "torch.matmul(a, b)", "fprop"),
        (BACKWARD, "torch.matmul(grad_output, weight)", "dgrad"),
        (BACKWARD, "grad_output.t().matmul(total_input)", "wgrad"),
        (BACKWARD, "fused.wgrad_gemm(input, grad_output, weight.main_grad)", "wgrad"),
        (BACKWARD, "g = cast(grad_output)\nmm(g, weight)", "dgrad"),
        (BACKWARD, "x = cast(total_input)\ng: T = cast(grad_output)\nmm(g, x)", "wgrad"),
        (ATTENTION, "torch.bmm(attention_probs, v)", "pv"),
        (ATTENTION, "p = softmax(s)\np *= 2\ntorch.bmm(p, value)", "pv"),
        (ATTENTION, "(q, k) = cast(query, key)\nmm(q, k)", "qk"),
        (ATTENTION, "b = empty(value.size(0))\ntorch.baddbmm(b, query, key)", "qk"),
    ],
)
def test_a_gemm_is_known_by_what_its_operands_are_computed_from(method, code, site):
    assert found(method, code)[-1] == ("gemm", site)


def test_a_use_belongs_to_the_gemm_behind_it():
    body = """
        q = cast(query, custom_quant_type)
        s = torch.matmul(q, key)
        if custom_quant_type == 'a':
            r = torch.bmm(attention_probs, value)
        elif custom_quant_type == 'b':
            r = b_bmm(attention_probs, value)
        print(custom_quant_type)
    """
    use, gemm = ("use", "pv"), ("gemm", "pv")
    assert found(ATTENTION, body) == [
        ("use", "qk"),
        ("gemm", "qk"),
        *(use, gemm, use, gemm),
        ("use", ""),
    ]


def test_uses_behind_the_last_known_gemm_belong_to_the_next_site():
    body = "mm(query, key)\nunknown(custom_quant_type)\n"
    assert found(ATTENTION, body)[-1] == ("use", "pv")


def test_without_any_gemm_a_use_belongs_to_a_methods_only_site():
    assert found(FORWARD, "unknown(custom_quant_type)") == [("use", "fprop")]
    assert found(BACKWARD, "unknown(custom_quant_type)") == [("use", "")]


def test_a_binding_names_its_site_and_is_no_other_use():
    body = "b = bind('pv', custom_quant_type, query, key)\nmm(b(query), key)\n"
    assert found(ATTENTION, body) == [("binding", "pv"), ("gemm", "qk")]
    assert found(ATTENTION, "log('pv', query)") == []
