"""Attention of transformers' models: the function, its operands, and what it refuses."""

import pytest
import torch
from mqo.quant.attention import NAME, attend, select
from mqo.quant.backend import fake_quantize
from mqo.quant.model import quantize_model
from mqo.quant.operand_table import OperandRow
from mqo.quant.quant_config import QuantConfig
from mqo.quant.quantization import ModelQuantization
from mqo.quant.recipe import Recipe
from mqo.quant.recipe_operands import Types
from mqo.quant.spec import QuantSpec
from torch import nn

transformers = pytest.importorskip("transformers")
BATCH, HEADS, GROUPS, TOKENS, DIM = 2, 4, 2, 24, 16
BLOCKS = 3


class LayerAttention(nn.Module):
    pass


class Model(nn.Module):
    """What `select` needs of a model of transformers."""

    def __init__(self, takes=True):
        super().__init__()
        self.layer = LayerAttention()
        self.config = self.layer.config = transformers.PretrainedConfig()
        self.takes = takes

    def set_attn_implementation(self, name):
        if self.takes:
            self.config._attn_implementation_internal = name


def layer_of(qk="none", pv="none", **options):
    model = Model()
    select(model, ModelQuantization(QuantConfig(asked={"qk": qk, "pv": pv}, **options)))
    return model.layer


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    shapes = [(BATCH, heads, TOKENS, DIM) for heads in (HEADS, GROUPS, GROUPS)]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def causal_mask():
    mask = torch.full((TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1)
    return mask[None, None]


def eager(query, key, value, mask, scaling, quantize=lambda x, site, axis: x):
    """Attention by its definition, of operands that `quantize` rounds."""
    key, value = (quantize(x, s, a) for x, s, a in ((key, "qk", -1), (value, "pv", -2)))
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    scores = quantize(query, "qk", -1) @ key.transpose(-1, -2) * scaling + mask
    probs = torch.softmax(scores, dim=-1)
    return (quantize(probs, "pv", -1) @ value).transpose(1, 2)


def gradients(output, inputs):
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    return torch.autograd.grad(output, inputs, upstream)


TURNED = dict.fromkeys(
    ("qk.query", "qk.key", "pv.probs", "pv.value"), OperandRow("none", hadamard=32)
)


@pytest.mark.parametrize(
    ("kind", "options"), [("none", {}), ("mxfp8", {"operands": TURNED})], ids=["plain", "turned"]
)
def test_without_types_it_is_attention(kind, options):
    inputs, mask = tensors(), causal_mask()
    ours = attend(layer_of(kind, kind, **options), *inputs, mask, 0.3)[0]
    theirs = eager(*inputs, mask, 0.3)
    torch.testing.assert_close(ours, theirs)
    for own, expected in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("qk", "pv"), [("mxfp8", "none"), ("none", "mxfp4"), ("hifp8", "hifp8")])
def test_each_site_has_the_operands_of_its_type(qk, pv):
    inputs, mask, types = tensors(), causal_mask(), {"qk": qk, "pv": pv}
    layer = layer_of(qk, pv)

    def quantize(x, site, axis):
        return fake_quantize(x, QuantSpec(types[site]), axis=axis)

    with torch.no_grad():
        ours = attend(layer, *inputs, mask, 0.3)[0]
        theirs = eager(*inputs, mask, 0.3, quantize)
    assert (ours - theirs).norm() < 1e-2 * theirs.norm()  # a tie may go to the other side
    assert {r.site for r in layer.mqo_quantization.records()} == {
        s for s in types if types[s] != "none"
    }


def test_a_group_is_rounded_once_for_all_of_its_heads():
    layer = layer_of("mxfp4", "mxfp4", rounding="stochastic")
    inputs = tensors()
    with layer.mqo_quantization.measuring() as measurements:
        attend(layer, *inputs, causal_mask(), 0.3)
    elements = {(m.site, m.operand): m.elements for m in measurements}
    assert elements["qk", "key"] == elements["pv", "value"] == BATCH * GROUPS * TOKENS * DIM
    assert elements["qk", "query"] == BATCH * HEADS * TOKENS * DIM


def test_the_scale_of_a_tensor_is_in_the_product():
    inputs = tensors(torch.bfloat16)
    output = attend(layer_of("nvfp4", "nvfp4"), *inputs, causal_mask(), 0.3)[0]
    assert output.dtype == torch.bfloat16 and output.isfinite().all()
    output.float().sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_a_cache_of_keys_may_be_longer_than_the_queries():
    query, key, value = tensors()
    mask = causal_mask()[..., -1:, :]
    ours = attend(layer_of(), query[:, :, -1:], key, value, mask, 0.3)[0]
    torch.testing.assert_close(ours, eager(*tensors(), causal_mask(), 0.3)[:, -1:])


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_what_it_does_not_compute_is_refused(name):
    with pytest.raises(ValueError, match=name):
        attend(layer_of(), *tensors(), None, **{name: 1.0})


def test_a_layer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="after quantize_model"):
        attend(LayerAttention(), *tensors(), None)


@pytest.mark.parametrize("model", [nn.Linear(4, 4), Model(takes=False)])
def test_a_model_with_another_attention_is_refused(model):
    with pytest.raises(ValueError, match=r"attention of (Linear|Model)"):
        select(model, ModelQuantization(QuantConfig()))


@pytest.fixture
def llama():
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": BLOCKS},
        **{"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "vocab_size": 96},
    )
    return transformers.LlamaForCausalLM(config)


IDS = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(3))


@pytest.mark.slow
def test_a_model_calls_it_in_each_layer_but_the_excluded(llama):
    before = llama(input_ids=IDS).logits
    shared = quantize_model(llama, "mxfp8", qk="mxfp8", pv="mxfp8", exclude=["model.layers.0.*"])
    assert llama.config._attn_implementation == NAME
    after = llama(input_ids=IDS, labels=IDS)
    after.loss.backward()
    assert (after.logits - before).norm() < 0.1 * before.norm()
    layers = {r.layer for r in shared.records() if r.site == "pv" and r.quant_type != "excluded"}
    assert layers == {f"model.layers.{n}.self_attn" for n in range(1, BLOCKS)}


def test_patterns_that_leave_out_all_attention_are_refused(llama):
    with pytest.raises(ValueError, match="leave out all attention"):
        quantize_model(llama, "mxfp8", qk="mxfp8", include=["*.mlp.*"])


def test_attention_that_never_ran_is_idle(llama):
    shared = quantize_model(llama, "mxfp8", qk="mxfp8", exclude=["lm_head"])
    names = {f"model.layers.{n}.self_attn" for n in range(BLOCKS)}
    assert names <= {*shared.idle_layers()}
    llama(input_ids=IDS)
    assert shared.idle_layers() == []


def test_a_model_that_takes_it_in_part_keeps_its_own(llama):
    before = llama.config._attn_implementation
    other = LayerAttention()
    other.config = transformers.PretrainedConfig()
    llama.model.extra = other
    with pytest.raises(ValueError, match=r"model\.extra"):
        quantize_model(llama, "mxfp8", qk="mxfp8")
    assert llama.config._attn_implementation == before
    assert isinstance(llama.lm_head, nn.Linear) and type(llama.lm_head) is nn.Linear


@pytest.mark.slow
def test_without_types_a_model_returns_its_logits(llama):
    before = llama(input_ids=IDS).logits
    select(llama, ModelQuantization(QuantConfig()))
    torch.testing.assert_close(llama(input_ids=IDS).logits, before, rtol=1e-4, atol=1e-5)


def test_types_of_its_backward_pass_are_refused():
    types = Types(fprop="mxfp8", qk="mxfp8", dv="mxfp8", dk="mxfp4")
    mine = Recipe(name="mine", summary="", source="", types=types)
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"mine recipe .*\(dv, dk\)"):
        quantize_model(model, mine)
    assert type(model[0]) is nn.Linear


def test_types_of_attention_are_refused_for_other_models():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="attention of Sequential"):
        quantize_model(model, "mxfp8", qk="mxfp8")
    assert type(model[0]) is nn.Linear
    with pytest.raises(ValueError, match="'mxfp9'"):
        quantize_model(model, "mxfp8", pv="mxfp9")
