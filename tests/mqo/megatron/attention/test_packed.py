"""Packed sequences against a mask that hides other documents."""

from types import SimpleNamespace

import pytest
import torch
from mqo.megatron.attention.choice import FusedAttentionError, without_scores
from mqo.megatron.attention.chunks import Span
from mqo.megatron.attention.packed import document_starts, spans_of
from mqo.quant.gemms import gemm_operands
from mqo.quant.progress import set_step

from .conftest import Layer, Tracker
from .test_chunked import error, gradients, unfused
from .test_chunked import small_chunks as small_chunks
from .typed import rows

ENDS = (0, 40, 41, 100, 150)
LENGTH = ENDS[-1]


def packed_of(ends=ENDS, **more):
    ends = torch.tensor(ends, dtype=torch.int32)
    sizes = {f"cu_seqlens_{kind}{end}": None for kind in ("q", "kv") for end in ("", "_padded")}
    sizes |= {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "qkv_format": "thd"}
    return SimpleNamespace(**sizes | more)


def document_mask():
    document = (torch.arange(LENGTH) >= torch.tensor(ENDS[1:])[:, None]).sum(0)
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return (document[:, None] != document) | later


@pytest.mark.parametrize("pv", ["none", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("shape", [{}, {"groups": 2, "value_width": 8}], ids=str)
@pytest.mark.parametrize("table", ["", rows("hadamard = 32")], ids=["plain", "transformed"])
def test_a_token_sees_its_own_document(operands, options, shape, pv, table):
    options(table)
    tensors = [t.detach()[:, :1].requires_grad_() for t in operands(LENGTH, LENGTH, **shape)]
    layer, types = Layer(), {"qk": "mxfp8", "pv": pv}
    expected = unfused(layer, ("mxfp8", pv), *tensors, document_mask())
    tokens = [t[:, 0] for t in tensors]
    attend = without_scores(layer, types, *tokens[:2], None, packed_of())
    found = attend(gemm_operands("qk", "mxfp8", layer), *tokens, Tracker())
    assert found.shape == expected[:, 0].shape
    found = found[:, None]
    tolerance = 1e-6 if pv != "none" else 1e-5  # torch's kernel adds up otherwise
    assert error(found, expected) < tolerance
    pairs = zip(gradients(found, tensors), gradients(expected, tensors), strict=True)
    assert all(error(one, other) < tolerance for one, other in pairs)


def test_stochastic_draws_are_those_of_the_masked_sequence(operands, options):
    options('[quantizer]\nrounding = "stochastic"\n')
    tensors = [t.detach()[:, :1] for t in operands(LENGTH, LENGTH)]
    layer = Layer()
    expected = unfused(layer, ("none", "mxfp4"), *tensors, document_mask())
    set_step(0)  # the same micro-batch again
    tokens = [t[:, 0] for t in tensors]
    attend = without_scores(layer, {"qk": "none", "pv": "mxfp4"}, *tokens[:2], None, packed_of())
    found = attend(gemm_operands("qk", "none", layer), *tokens, Tracker())
    assert error(found[:, None], expected) < 1e-6


def test_padding_is_its_documents_and_the_rest_is_one_more():
    padded = torch.tensor([0, 48, 112], dtype=torch.int32)
    packed = packed_of(cu_seqlens_q_padded=padded, cu_seqlens_kv_padded=padded)
    assert document_starts(packed, 112) == (0, 48)
    assert document_starts(packed, 128) == (0, 48, 112)
    assert spans_of(128, 128, (0, 1), (0, 48, 112))[1:] == [
        Span(48, 112, 48, first=48),
        Span(112, 128, 112, first=112),
    ]


def test_trailing_ends_of_a_padded_list_are_no_documents():
    assert document_starts(packed_of((0, 5, 9, 9, 9)), 9) == (0, 5)


def test_the_device_is_asked_once_for_all_layers():
    packed = packed_of()
    assert document_starts(packed, LENGTH) == ENDS[:-1]
    packed.cu_seqlens_q = packed.cu_seqlens_kv = None
    assert document_starts(packed, LENGTH) == ENDS[:-1]


@pytest.mark.parametrize(
    ("packed", "layer", "why"),
    [
        (packed_of(cu_seqlens_kv=torch.tensor([0, 150])), Layer(), "packed differently"),
        (packed_of(qkv_format="sbhd"), Layer(), "valid: thd"),
        (packed_of(), Layer("unfused"), "unfused"),
        (packed_of(), Layer(dropout=0.5), "--attention-dropout"),
    ],
)
def test_what_cannot_be_is_refused(operands, packed, layer, why):
    query, key, _ = (t[:, 0] for t in operands(LENGTH, LENGTH))
    with pytest.raises(FusedAttentionError, match=why):
        without_scores(layer, {"qk": "none", "pv": "mxfp8"}, query, key, None, packed)


def test_ranks_of_the_context_are_refused(operands):
    query, key, _ = (t[:, 0] for t in operands(LENGTH, LENGTH))
    layer = Layer()
    layer.mqo_part = (0, 2)
    with pytest.raises(FusedAttentionError) as error:
        without_scores(layer, {"qk": "none", "pv": "none"}, query, key, None, packed_of())
    assert str(error.value) == (
        "attention layer 3: packed sequences do not support context parallelism. Expected: "
        "--context-parallel-size 1"
    )
