"""Operands at the five sites: axes, options, straight-through gradients, layers, and 'none'."""

import pytest
import torch
from mqo.quant.backend import fake_quantize
from mqo.quant.formats import SITES
from mqo.quant.gemms import gemm_operands
from mqo.quant.progress import set_step
from mqo.quant.record import RECORDER
from mqo.quant.spec import QuantSpec

from .tensors import normal

TYPES = ("mxfp8", "mxfp4", "hifp8")
# (site, left shape, left contraction axis, right shape, right contraction axis)
GEMMS = [
    ("fprop", (5, 2, 64), 2, (48, 64), 1),
    ("dgrad", (5, 2, 48), 2, (48, 64), 0),
    ("wgrad", (40, 48), 0, (40, 64), 0),
    ("qk", (40, 6, 64), 2, (40, 6, 64), 2),
    ("pv", (6, 40, 40), 2, (40, 6, 64), 0),
    ("qk_recompute", (40, 6, 64), 2, (40, 6, 64), 2),
    ("dv", (6, 40, 40), 1, (40, 6, 64), 0),
    ("dp", (40, 6, 64), 2, (40, 6, 64), 2),
    ("dq", (6, 40, 40), 2, (40, 6, 64), 0),
    ("dk", (6, 40, 40), 1, (40, 6, 64), 0),
]
every_gemm = pytest.mark.parametrize("gemm", GEMMS, ids=[gemm[0] for gemm in GEMMS])


def powers_but_along(shape, axis, seed):
    """Random powers of two that are constant along `axis`: they pass through blocks that run
    along it, and through no others."""
    exponents = torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed))
    return 2.0 ** exponents.select(axis, 0).unsqueeze(axis).expand(shape)


def test_the_gemms_above_are_all_the_sites():
    assert [gemm[0] for gemm in GEMMS] == list(SITES)


@every_gemm
def test_blocks_run_along_the_contraction_axis(gemm):
    site, lhs_shape, lhs_axis, rhs_shape, rhs_axis = gemm
    operands = gemm_operands(site, "mxfp4", None)
    for quantize, shape, axis in (
        (operands.lhs, lhs_shape, lhs_axis),
        (operands.rhs, rhs_shape, rhs_axis),
    ):
        x = normal(*shape)
        for other in range(len(shape)):
            powers = powers_but_along(shape, other, seed=other)
            passes = quantize(x * powers).equal(quantize(x) * powers)
            assert passes == (other == axis)


@every_gemm
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_are_those_of_the_reference(gemm, kind, dtype):
    site, lhs_shape, lhs_axis, rhs_shape, rhs_axis = gemm
    operands = gemm_operands(site, kind, None)
    lhs, rhs = normal(*lhs_shape, dtype=dtype), normal(*rhs_shape, seed=1, dtype=dtype)
    assert operands.lhs(lhs).equal(fake_quantize(lhs, QuantSpec(kind), axis=lhs_axis))
    assert operands.rhs(rhs).equal(fake_quantize(rhs, QuantSpec(kind), axis=rhs_axis))


def test_the_runs_options_reach_the_quantizer(options):
    options('[quantizer]\nblock = 16\nscale_rule = "rceil"\noverflow = "inf"\n')
    x = 300 * normal(4, 64)
    fprop = gemm_operands("fprop", "mxfp8", None)
    expected = fake_quantize(x, QuantSpec("mxfp8", block=16, scale_rule="rceil"))
    assert fprop.lhs(x).equal(expected)
    assert not expected.equal(fake_quantize(x, QuantSpec("mxfp8")))
    assert gemm_operands("qk", "hifp8", None).lhs(torch.tensor([5e4])).isinf().all()


@every_gemm
@pytest.mark.parametrize("kind", TYPES)
def test_gradients_pass_straight_through(gemm, kind):
    site, lhs_shape, _, rhs_shape, _ = gemm
    operands = gemm_operands(site, kind, None)
    for quantize, shape in ((operands.lhs, lhs_shape), (operands.rhs, rhs_shape)):
        x = (1e5 * normal(*shape)).requires_grad_()  # large enough for hifp8 to saturate
        upstream = normal(*shape, seed=7)
        quantize(x).backward(upstream)
        assert x.grad.equal(upstream)


@every_gemm
def test_none_passes_the_very_same_tensors_and_leaves_no_record(gemm):
    operands = gemm_operands(gemm[0], "none", None)
    x = normal(4, 32).requires_grad_()
    assert operands.lhs(x) is x
    assert operands.rhs(x) is x
    assert RECORDER.entries() == []


def test_an_unknown_site_is_refused_whatever_the_type():
    for kind in ("none", "mxfp8"):
        with pytest.raises(ValueError, match="'router'; valid: fprop, dgrad, wgrad, qk, pv"):
            gemm_operands("router", kind, None)


def test_an_unknown_type_is_refused():
    with pytest.raises(ValueError, match="'bf16'; valid: none, mxfp8, mxfp4, hifp8"):
        gemm_operands("fprop", "bf16", None)


def test_the_owner_names_the_layer():
    owner = torch.nn.Identity()
    owner.mqo_layer = "decoder.layers.3.self_attention.core_attention"
    gemm_operands("qk", "mxfp8", owner).lhs(normal(4, 2, 32))
    gemm_operands("qk", "mxfp8", torch.nn.Identity()).rhs(normal(4, 2, 32))
    assert [(entry.layer, entry.operand) for entry in RECORDER.entries()] == [
        ("decoder.layers.3.self_attention.core_attention", "query"),
        ("unlabeled", "key"),
    ]


def test_recomputation_counts_again_and_gives_the_same_gradients():
    def attend(query, key):
        q = gemm_operands("qk", "mxfp8", None)
        return (q.lhs(query) * q.rhs(key)).sum()

    grads = []
    for recompute in (False, True):
        RECORDER.reset()
        query, key = (normal(8, 2, 32, seed=s).requires_grad_() for s in (0, 1))
        if recompute:
            torch.utils.checkpoint.checkpoint(attend, query, key, use_reentrant=False).backward()
        else:
            attend(query, key).backward()
        grads.append((query.grad, key.grad))
        assert {entry.calls for entry in RECORDER.entries()} == {2 if recompute else 1}
    assert all(one.equal(two) for one, two in zip(*grads, strict=True))


@pytest.mark.parametrize("site", ["qk", "pv"])
def test_heads_of_a_group_share_their_draws(options, site):
    """The unfused path repeats a key for its group's queries, and the fused one does not."""
    options('[quantizer]\nrounding = "stochastic"\n')
    attention = torch.nn.Module()
    attention.num_attention_heads_per_partition, attention.num_query_groups_per_partition = 8, 2
    key = normal(32, 3, 2, 64)  # [sk, b, ng, hn]
    fused = gemm_operands(site, "mxfp4", attention).rhs(key)
    set_step(0)
    repeated = key.repeat_interleave(4, dim=2).view(32, 3 * 8, 64).requires_grad_()
    unfused = gemm_operands(site, "mxfp4", attention).rhs(repeated)
    assert unfused.equal(fused.repeat_interleave(4, dim=2).view(32, 3 * 8, 64))
    (grad,) = torch.autograd.grad(unfused, repeated, torch.ones_like(unfused))
    assert grad.equal(torch.ones_like(grad))
