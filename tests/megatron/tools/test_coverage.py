"""How products are told apart, on small functions and modules of our own."""

from dataclasses import astuple

import pytest

torch = pytest.importorskip("torch")
from torch.utils.checkpoint import checkpoint  # noqa: E402

META = {"device": "meta", "requires_grad": True}


@pytest.fixture(scope="module")
def program(load_program):
    return load_program("coverage")


@pytest.fixture
def products(program):
    return program.Products()


class Sited(torch.nn.Module):
    """Scores as attention's, through a site's operands, and a projection that no site wraps."""

    def __init__(self, products):
        super().__init__()
        self.products = products
        self.mqo_layer = "scores"
        with torch.device("meta"):
            self.router = torch.nn.Linear(4, 3, bias=False)

    def forward(self, x):
        operands = self.products.operands("qk", "mxfp8", self)
        scores = torch.bmm(operands.lhs(x), operands.rhs(x).transpose(1, 2))
        return scores.sum() + self.router(x[0]).sum()


class Frozen(torch.autograd.Function):
    """A product without a site, whose backward pass is written by hand."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x.matmul(weight.t())

    @staticmethod
    def backward(ctx, grad):
        return grad.matmul(ctx.saved_tensors[0]), None


def run(products, model, loss):
    with products, products.following(model):
        loss().backward()


QK = ("scores", "qk", "mxfp8", 2, 5, 5, 4)
QK_BACKWARD = [("scores", "qk backward", None, *s) for s in ((2, 4, 5, 5), (2, 5, 4, 5))]
ROUTER = ("router", "mm", None, 1, 5, 3, 4)
# Of x alone the router's gradient is 5 x 4; that of its weight is 3 x 4.
ROUTER_BACKWARD = [("router", "mm backward", None, *s) for s in ((1, 3, 4, 5), (1, 5, 4, 3))]
ALL = {QK: 1, ROUTER: 1, **dict.fromkeys([*QK_BACKWARD, *ROUTER_BACKWARD], 1)}


def test_products_are_told_apart_by_site_module_and_what_they_differentiate(products, program):
    model, x = Sited(products), torch.empty(2, 5, 4, **META)
    run(products, model, lambda: model(x))
    assert {astuple(p)[:-1]: calls for p, calls in products.counts.items()} == ALL
    assert sum(row["flops"] for row in program.rows(products)) == 3 * (400 + 120)


def test_backward_products_of_attention_are_those_of_their_sites(products, program):
    model, x = Sited(products), torch.empty(2, 5, 4, **META)
    for site in ("qk_recompute", "dq", "dk"):
        products.operands(site, "none" if site == "dk" else "mxfp4", model)
    run(products, model, lambda: model(x))
    own = {astuple(p)[1:-1]: calls for p, calls in products.counts.items() if p.layer == "scores"}
    again, dq, dk = ("qk_recompute", "mxfp4"), ("dq", "mxfp4"), ("dk", "none")
    shapes = {again: QK[3:], dq: QK_BACKWARD[1][3:], dk: QK_BACKWARD[0][3:]}
    assert own == dict.fromkeys([QK[1:], *(name + size for name, size in shapes.items())], 1)
    assert sum(row["flops"] for row in program.rows(products)) == 4 * 400 + 3 * 120


def test_what_is_recomputed_in_the_backward_pass_counts_again(products):
    model, x = Sited(products), torch.empty(2, 5, 4, **META)
    run(products, model, lambda: checkpoint(model, x, use_reentrant=True))
    assert {astuple(p)[:-1]: calls for p, calls in products.counts.items()} == {
        **ALL,
        QK: 2,
        ROUTER: 2,
    }


def test_a_hand_written_backward_pass_is_of_its_forward_product(products):
    model = torch.nn.Identity()
    x, weight = torch.empty(5, 4, **META), torch.empty(3, 4, device="meta")
    run(products, model, lambda: Frozen.apply(model(x), weight).sum())
    outside = "outside of all modules"
    assert [astuple(p)[:2] for p in products.counts] == [(outside, "mm"), (outside, "mm backward")]


def test_operands_without_a_product_are_an_error(products, program):
    products.operands("wgrad", "none", torch.nn.Identity())
    with pytest.raises(program.CoverageError, match=r"^wgrad of outside of all modules "):
        products.operands("fprop", "none", torch.nn.Identity())
    with pytest.raises(program.CoverageError, match=r"^wgrad of outside of all modules "):
        program.rows(products)


def test_a_product_of_other_operands_is_an_error(products, program):
    x = torch.empty(5, 4, device="meta")
    operands = products.operands("fprop", "mxfp8", torch.nn.Identity())
    operands.lhs(x)
    operands.rhs(x)
    with products, pytest.raises(program.CoverageError, match=r"^Product\(.*'fprop'"):
        torch.mm(x, torch.empty(4, 6, device="meta"))


def test_work_that_is_counted_elsewhere_and_not_here_is_an_error(products, program):
    x, kernel = torch.empty(1, 1, 8, 8, device="meta"), torch.empty(1, 1, 3, 3, device="meta")
    with products:
        torch.nn.functional.conv2d(x, kernel)
    with pytest.raises(program.CoverageError, match=r"0 FLOPs.* 648"):
        program.rows(products)


def test_a_weight_that_multiplies_nothing_is_a_lookup(products, program):
    with torch.device("meta"):
        inner = torch.nn.ModuleDict(
            {"words": torch.nn.Embedding(7, 4), "up": torch.nn.Linear(4, 6, bias=False)}
        )
    wrapped = torch.nn.ModuleDict({"module": inner})
    tokens = torch.empty(5, dtype=torch.long, device="meta")
    run(products, wrapped, lambda: inner["up"](inner["words"](tokens)).sum())
    assert program.lookups(wrapped, products.multiplied) == ["words"]
