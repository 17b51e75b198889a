import textwrap

import pytest
from mqo.overlay.literals import Source
from mqo.overlay.quant_types.gemms import ATTEND, BACKWARD, FORWARD, find_gemms


def found(sites, body):
    """[(site, lines of what it reads)] of the GEMMs of a function; its body starts on line 1."""
    text = "def f():\n" + textwrap.indent(textwrap.dedent(body).lstrip("\n"), "    ")
    source = Source.parse(text.encode())
    (function,) = source.tree.body
    gemms = [gemm for gemm in find_gemms(function, sites, source) if gemm.site]
    return [(gemm.site, sorted({getattr(t, "line", t) - 1 for t in gemm.reads})) for gemm in gemms]


# -- what is a GEMM ----------------------------------------------------------------------------


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
    ],
)
def test_a_gemm_by_its_name(call):
    assert found(ATTEND, f"x = {call}\nreturn x") == [("qk", [])]


@pytest.mark.parametrize(
    "call",
    [
        "product(query, key, custom_quant_type)",
        "product(query, key, quant_type=custom_quant_type)[1:]",
        "product(query, key, FORMATS[custom_quant_type]).to(dtype)",
        "PRODUCTS[custom_quant_type](query, key)",
        "product_of(custom_quant_type)(query, key)",
        "query.product(key, custom_quant_type)",
    ],
)
def test_a_call_that_takes_a_type_and_two_operands_is_a_gemm(call):
    body = f"custom_quant_type = 'mxfp8'\nx = {call}\nreturn x"
    assert found(ATTEND, body) == [("qk", [1])]


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
def test_what_is_no_gemm_or_nobodys(call):
    assert found(ATTEND, f"custom_quant_type = 'mxfp8'\nreturn {call}") == []


# -- its result flows on -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "dump_mm(query, key, custom_quant_type)",
        "dump(query, key, quant_type=custom_quant_type, stage='before')",
        "_ = dump(query, key, custom_quant_type)",
        "handle = dump(query, key, custom_quant_type); handle.wait()",
        "log.info(dump(query, key, custom_quant_type))",
        "if dump(query, key, custom_quant_type): pass",
        "log['scores'] = dump(query, key, custom_quant_type)",
        "self.dumped = dump(query, key, custom_quant_type)",
    ],
)
def test_a_call_whose_result_is_dropped_is_none(statement):
    body = f"custom_quant_type = 'mxfp8'\n{statement}\nreturn torch.bmm(query, key)"
    assert found(ATTEND, body) == [("qk", [])]


@pytest.mark.parametrize(
    "statements",
    [
        "return {}.view(size)",
        "x = {}\ny = softmax(x + 1)\nreturn None, y",
        "x = {} if fast else slow()\nreturn x",
        "out = []\nout.append({})\nreturn out",
        "out[0] = {}\nreturn out",
        "out.copy_({})\nreturn out",
        "self.scores = {}\nreturn self.scores",
        "for head in heads:\n  x = {}\nreturn x",
        "if (x := {}) is not None: return x",
        "def inner():\n  return {}\nreturn checkpoint(inner)",
        "weight.main_grad.add_({})",
        "weight.grad = {}",
        "weight.main_grad += {}",
    ],
)
def test_a_result_that_is_returned_or_goes_into_a_gradient_flows_on(statements):
    assert found(ATTEND, statements.format("torch.bmm(query, key)")) == [("qk", [])]


def test_a_result_that_goes_into_another_gemm_flows_on_when_that_ones_does():
    body = "s = mm(query, key)\nc = mm(softmax(s), value)\n"
    assert found(ATTEND, body) == []
    assert found(ATTEND, body + "return c") == [("qk", []), ("pv", [])]


@pytest.mark.parametrize(
    "call",
    [
        "fused.wgrad_gemm_accum(input, grad_output, weight.main_grad)",
        "torch.matmul(grad_output.t(), input, out=weight.main_grad)",
    ],
)
def test_a_gemm_that_writes_a_gradient_returns_nothing(call):
    assert found(BACKWARD, call) == [("wgrad", [])]


def test_a_gemm_may_write_what_is_returned():
    assert found(ATTEND, "torch.bmm(query, key, out=x)\nreturn x") == [("qk", [])]


# -- whose it is -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sites", "code", "site"),
    [
        (FORWARD, "return torch.matmul(a, b)", "fprop"),
        (BACKWARD, "return torch.matmul(grad_output, weight)", "dgrad"),
        (BACKWARD, "return grad_output.t().matmul(total_input)", "wgrad"),
        (BACKWARD, "return mm(grad_output, ctx.weight)", "dgrad"),
        (BACKWARD, "g = cast(grad_output)\nreturn mm(g, weight)", "dgrad"),
        (BACKWARD, "x = cast(total_input)\ng: T = cast(grad_output)\nreturn mm(g, x)", "wgrad"),
        (ATTEND, "return torch.bmm(attention_probs, v)", "pv"),
        (ATTEND, "p = softmax(s)\np *= 2\nreturn torch.bmm(p, value)", "pv"),
        (ATTEND, "(q, k) = cast(query, key)\nreturn mm(q, k)", "qk"),
        (ATTEND, "q, k = [cast(x) for x in (query, key)]\nreturn mm(q, k)", "qk"),
        (ATTEND, "b = empty(value.size(0))\nreturn torch.baddbmm(b, query, key)", "qk"),
        (ATTEND, "s = mm(query, key)\nreturn mm(softmax(s), v)", "pv"),
    ],
)
def test_a_gemm_is_known_by_what_its_operands_are_computed_from(sites, code, site):
    assert found(sites, code)[-1][0] == site


def test_a_gradient_is_an_operand():
    body = "custom_quant_type = 'a'\nreturn product(grad_output, weight, custom_quant_type)"
    assert found(BACKWARD, body) == [("dgrad", [1])]


@pytest.mark.parametrize(
    "code",
    [
        "return mm(grad_output, something)",
        "g, x = cast(grad_output, input)\nreturn mm(g, weight)",
    ],
)
def test_a_gemm_of_unknown_operands_or_of_several_sites_has_none(code):
    assert found(BACKWARD, code) == []


def test_operands_that_keep_their_names_keep_their_places():
    code = "grad_output, input = cast(grad_output, input)\nreturn mm(grad_output, weight)"
    assert found(BACKWARD, code) == [("dgrad", [])]


# -- what it reads -----------------------------------------------------------------------------


def test_branches_on_the_variable_choose_the_gemm():
    body = """
        custom_quant_type = 'mxfp8'
        if custom_quant_type == 'a':
            s = a_mm(query, key)
        elif custom_quant_type == 'b':
            s = b_mm(query, key)
        else:
            s = torch.bmm(query, key)
        return torch.bmm(softmax(s), value)
    """
    assert found(ATTEND, body) == [("qk", [1]), ("qk", [1]), ("qk", [1]), ("pv", [])]


@pytest.mark.parametrize(
    "choice",
    [
        "if custom_quant_type == 'a':\n    cast = a_cast\nelse:\n    cast = same",
        "cast = a_cast if custom_quant_type == 'a' else same",
        "cast = CASTS[custom_quant_type]",
        "match custom_quant_type:\n    case 'a':\n        cast = a_cast\n    case _:\n"
        "        cast = same",
        "wanted = custom_quant_type != 'none'\nif wanted:\n    query = a_cast(query)\ncast = same",
    ],
)
def test_what_a_type_chose_carries_it(choice):
    body = f"custom_quant_type = 'a'\n{choice}\nreturn torch.bmm(cast(query), cast(key))"
    assert found(ATTEND, body) == [("qk", [1])]


def test_a_branch_that_returns_chooses_what_follows():
    body = """
        custom_quant_type = 'a'
        if custom_quant_type == 'a':
            return a_mm(query, key)
        return torch.bmm(query, key)
    """
    assert found(ATTEND, body) == [("qk", [1]), ("qk", [1])]


def test_a_branch_that_raises_chooses_nothing():
    body = """
        custom_quant_type = 'a'
        if custom_quant_type not in KNOWN:
            raise Unknown(custom_quant_type)
        return torch.bmm(query, key)
    """
    assert found(ATTEND, body) == [("qk", [])]


def test_a_type_that_chose_a_product_is_no_type_of_the_next_gemm():
    body = """
        custom_quant_type = 'a'
        if custom_quant_type == 'a':
            s = a_mm(query, key).to(dtype)
        else:
            s = torch.bmm(query, key)
        return torch.bmm(softmax(s), value)
    """
    assert found(ATTEND, body)[-1] == ("pv", [])


def test_a_second_branch_on_the_same_type_that_rounds_an_operand_reads_it():
    body = """
        custom_quant_type = 'a'
        s = a_mm(query, key, custom_quant_type)
        p = softmax(s)
        if custom_quant_type == 'a':
            p = a_cast(p)
        return torch.bmm(p, value)
    """
    assert found(ATTEND, body) == [("qk", [1]), ("pv", [1])]


def test_a_product_that_is_scaled_by_a_type_takes_it_to_the_next_gemm():
    body = """
        custom_quant_type = 'a'
        s = descale(a_mm(query, key, custom_quant_type), custom_quant_type)
        custom_quant_type = 'b'
        return a_mm(softmax(s), value, custom_quant_type)
    """
    assert found(ATTEND, body) == [("qk", [1]), ("pv", [1, 3])]


@pytest.mark.parametrize(
    "statement",
    [
        "s = {'a': lambda: a_mm(query, key)}[custom_quant_type]()",
        "s = custom_quant_type == 'a' and a_mm(query, key) or mm(query, key)",
        "s = descale(mm(query, key), custom_quant_type)",
        "s = stack([mm(q, key) for q in cast(query, custom_quant_type)])",
    ],
)
def test_a_type_beside_a_gemm_in_its_statement_is_read(statement):
    body = f"custom_quant_type = 'a'\n{statement}\nreturn s"
    assert all(1 in reads for _, reads in found(ATTEND, body))
    assert found(ATTEND, body)


def test_a_literal_that_nothing_reads_is_nobodys():
    body = "custom_quant_type = 'a'\nreturn torch.bmm(query, key)"
    assert found(ATTEND, body) == [("qk", [])]
