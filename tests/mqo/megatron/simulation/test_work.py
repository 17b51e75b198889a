"""FLOPs, bytes and names of what runs, by hand."""

from types import SimpleNamespace

import pytest
import torch
from mqo.megatron.simulation.watch import Watch
from mqo.megatron.simulation.work import Tag, Tags, Works, tagging
from mqo.quant.backend import fake_quantize
from mqo.quant.gemms import gemm_operands
from torch.nn.functional import scaled_dot_product_attention


def counted(function, tags=None):
    works = Works(tags or Tags())
    with Watch(works):
        function()
    return works.counts


def products(found):
    return {work: calls for work, calls in found.items() if work.flops}


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda: torch.mm(torch.ones(3, 5), torch.ones(5, 7)), (1, 3, 7, 5)),
        (lambda: torch.bmm(torch.ones(2, 3, 5), torch.ones(2, 5, 7)), (2, 3, 7, 5)),
        (lambda: torch.addmm(torch.ones(7), torch.ones(3, 5), torch.ones(5, 7)), (1, 3, 7, 5)),
        (
            lambda: torch.baddbmm(torch.ones(2, 3, 7), torch.ones(2, 3, 5), torch.ones(2, 5, 7)),
            (2, 3, 7, 5),
        ),
    ],
    ids=["mm", "bmm", "addmm", "baddbmm"],
)
def test_a_product_has_its_shape_and_flops(function, shape):
    ((work, calls),) = products(counted(function)).items()
    batch, m, n, k = shape
    assert (work.shape, work.flops, calls) == (shape, 2 * batch * m * n * k, 1)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_has_two_products_forward_and_five_backward(causal):
    query, key = (torch.ones(2, 4, 16, 8, requires_grad=True) for _ in range(2))

    def run():
        scaled_dot_product_attention(query, key, key, is_causal=causal).sum().backward()

    forward, backward = products(counted(run))
    one = 2 * 2 * 4 * 16 * 16 * 8
    assert (forward.flops, backward.flops) == (2 * one, 5 * one)
    assert {forward.masked, backward.masked} == {0.5 * causal}
    assert (forward.gemm, backward.gemm) == ("fused attention", "fused attention backward")


def test_what_is_no_product_moves_what_it_reads_and_writes():
    found = counted(lambda: torch.ones(10) + torch.ones(10))
    assert {work.gemm: work.size for work in found}["add"] == 3 * 40


def test_views_and_fresh_memory_move_nothing():
    assert counted(lambda: torch.empty(10).view(2, 5).t()) == {}


def test_a_product_is_named_by_the_site_that_took_its_operands():
    tags, fprop = Tags(), Tag("fprop", "a.layer", "mxfp8")
    x, weight, other = torch.ones(3, 5), torch.ones(7, 5), torch.ones(5, 2)
    tags.put(x, fprop, "lhs")
    tags.put(weight, fprop, "rhs")
    (named,) = products(counted(lambda: x @ weight.t(), tags))
    assert named[:3] == ("a.layer", "fprop", "mxfp8")
    (half,) = products(counted(lambda: x @ other, tags))
    assert half[:3] == ("a.layer", "fprop", None)  # one operand is nobody's
    (plain,) = products(counted(lambda: torch.ones(3, 5) @ other, tags))
    assert plain[:3] == ("", "mm", None)


def test_operands_of_two_types_name_both():
    tags = Tags()
    x = tags.put(torch.ones(3, 5), Tag("fprop", "a", "none"), "lhs")
    weight = tags.put(torch.ones(5, 7), Tag("fprop", "a", "nvfp4"), "rhs")
    (work,) = products(counted(lambda: x @ weight, tags))
    assert work.quant_type == "none x nvfp4"


def test_a_freed_tensor_leaves_no_tag_behind():
    tags = Tags()
    for _ in range(50):  # the same memory again and again
        x = torch.ones(4, 4)
        assert tags.get(x) is None
        tags.put(x, Tag("qk", "a", "mxfp4"), "lhs")
        assert tags.get(x.t()).site == "qk"
        del x


def test_what_autograd_multiplies_is_named_after_its_forward():
    tags, qk = Tags(), Tag("qk", "attention", "mxfp8")
    query = torch.ones(2, 3, 5, requires_grad=True)
    key = torch.ones(2, 5, 7, requires_grad=True)
    for one in (query, key):
        tags.put(one, qk, "lhs")
    found = products(counted(lambda: torch.bmm(query, key).sum().backward(), tags))
    assert {(work.gemm, work.quant_type): calls for work, calls in found.items()}[
        "qk", "mxfp8"
    ] == 1
    assert sum(calls for work, calls in found.items() if work.gemm == "qk backward") == 2


def test_quantized_operands_are_tagged_with_what_they_are_rounded_to():
    tags = Tags()
    operands = tagging(gemm_operands, tags)("fprop", "hif4", SimpleNamespace(mqo_layer="a"))
    x = operands.lhs(torch.ones(2, 2))
    assert x.equal(fake_quantize(torch.ones(2, 2), "hif4"))
    assert tags.get(x) == Tag("fprop", "a", "hif4") == tags.latest["fprop"]
    assert operands.site.name == "fprop"


def test_an_operand_with_the_values_of_fprop_has_its_type(options):
    options(
        '[asked]\nfprop = "hif4"\ndgrad = "mixed"\n[operands]\n'
        '"dgrad.weight" = { quant_type = "none", source = "fprop" }\n'
    )
    tags = Tags()
    operands = tagging(gemm_operands, tags)("dgrad", "mixed", SimpleNamespace(mqo_layer="a"))
    assert tags.get(operands.rhs(torch.ones(2, 2))) == Tag("dgrad", "a", "hif4")


def test_chunks_of_attention_keep_the_tags_of_their_operands():
    tags, layer = Tags(), SimpleNamespace(mqo_layer="a")
    operands = tagging(gemm_operands, tags)("dk", "mxfp8", layer)
    parts = operands.lhs_parts((1, 4, 4), 1.0, torch.device("cpu"))
    scores = parts.quantize(torch.ones(1, 4, 4), 0, 0, out=torch.empty(1, 4, 4))
    query = operands.rhs(torch.ones(4, 1, 8))

    def backward(_):
        torch.bmm(scores.transpose(1, 2), query.transpose(0, 1).contiguous().clone())
        torch.bmm(scores, torch.ones(1, 4, 2))

    x = torch.ones((), requires_grad=True)
    x.register_hook(backward)
    found = products(counted(lambda: x.sigmoid().backward(), tags))
    assert [(work.gemm, work.quant_type) for work in found] == [
        ("dk", "mxfp8"),
        ("dk backward", None),
    ]


def test_copies_of_a_linear_layers_operand_have_no_tag():
    tags, x, copies = Tags(), torch.ones(2, 2), []
    tags.put(x, Tag("fprop", "a", "none"), "lhs")
    counted(lambda: copies.append(x.clone()), tags)
    assert tags.get(copies[0]) is None
