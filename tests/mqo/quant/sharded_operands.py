"""Run as a program: operands that two tensor-parallel ranks share, quantized with one scale.

python sharded_operands.py FOLDER_OF_THE_DEMOS FOLDER_TO_WRITE_TO

Each rank's operands are shards of what one process makes of the whole, bit for bit, and so is what
is measured of them; a NaN of one rank's shard is everyone's. Leaves with 1 where that is not so.
"""

import math
import os
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import torch
import world  # before megatron: it makes its tree's megatron the one that is found
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from mqo.megatron.layers import label_layers
from mqo.project import Project
from mqo.quant import config, weights
from mqo.quant.backend import fake_quantize
from mqo.quant.formats import ATTENTION_BACKWARD, SITES
from mqo.quant.measurement import merge
from mqo.quant.plugin_file import load_quantizers
from mqo.quant.plugins import PLUGINS
from mqo.quant.quantization import PROCESS
from mqo.quant.record import RECORDER
from mqo.quant.scales import alpha_of
from mqo.quant.spec import QuantSpec, without_alpha
from torch import distributed

KINDS = ("fp8_tensor_e4m3", "nvfp4")
SUM = "averis"  # a sum of two terms, each with a scale of its own
TOKENS, WIDE, TALL, HEADS = 32, 64, 96, 4
SITE_AXES = {
    (site.name, name): axis
    for site in SITES.values()
    for name, axis in ((site.lhs, site.lhs_axis), (site.rhs, site.rhs_axis))
}
# The axis along which an operand is cut, by what its layer's name ends in.
CUTS = {
    "column": {"weight": 0, "grad": -1},
    "row": {"weight": 1, "x": -1},
    "attention": {"query": 2, "key": 2, "value": 2, "probs": 0},
    "linear_fc1": {"weight": 0, "grad": -1},
    "linear_fc2": {"weight": 1, "x": -1},
}


def options(kind, **quantizer):
    """Have every site quantize to `kind`: a schedule takes the place of the source's 'none'.

    A function in Python cannot be the type of a product of attention's backward pass.
    """
    sites = SITES if kind in KINDS else SITES.keys() - ATTENTION_BACKWARD
    lines = [f'{site} = "{kind}"' for site in sites]
    chosen = [f"{key} = {value}" for key, value in quantizer.items()]
    path = Path(sys.argv[2]) / f"{distributed.get_rank()}.toml"
    path.write_text(
        "\n".join(("[schedule]", *lines, "[record]", "every = 1", "[quantizer]", *chosen))
    )
    os.environ[config.ENVIRONMENT_VARIABLE] = str(path)
    config.reset()
    weights.clear()
    RECORDER.reset()


def rank_of(group):
    return (group.rank(), group.size()) if group else (0, 1)


def cut(whole, dim, part):
    rank, ranks = part
    return whole.chunk(ranks, dim)[rank]


def uneven(*shape, seed):
    """Normal numbers that grow along both of the last axes: no two shards have one amax.

    They are multiples of 2^-10, so that float32 has their sums over tokens, in any order.
    """
    x = world.random(*shape, seed=seed)
    for dim in (-1, -2):
        x = x * torch.linspace(1, 3, shape[dim]).reshape(shape[dim], *[1] * (-1 - dim))
    return (x * 1024).round() / 1024


class Seen:
    """What the quantizers were given and returned, {(site, layer, operand): (x, Rounded)}."""

    def __init__(self):
        self.operands = {}
        PROCESS.begin_step(1)
        self.observe = RECORDER.observe
        RECORDER.observe = self._note

    def _note(self, site, layer, operand, spec, axis, original, rounded, **named):
        kept = original.detach().clone(), rounded.map(lambda tensor: tensor.detach().clone())
        self.operands[site, layer, operand] = kept
        self.observe(site, layer, operand, spec, axis, original, rounded, **named)

    def close(self):
        del RECORDER.observe
        self.measured = RECORDER.end_step()
        return self


def linear(kind, sequence_parallel=False, passes=1):
    """Run a layer forward and backward on given tensors; return what was seen, and messages."""
    chosen = world.config(
        hidden_size=WIDE,
        sequence_parallel=sequence_parallel,
        tensor_model_parallel_size=distributed.get_world_size() if sequence_parallel else 1,
    )
    made = {"config": chosen, "init_method": chosen.init_method, "bias": False}
    if kind == "column":
        layer = ColumnParallelLinear(WIDE, TALL, gather_output=False, **made)
    else:
        layer = RowParallelLinear(WIDE, TALL, input_is_parallel=True, skip_bias_add=False, **made)
    model = torch.nn.ModuleDict({kind: layer})
    label_layers(model)
    part = rank_of(layer.tp_group)
    cuts, sequence = CUTS[kind], (lambda t: cut(t, 0, part)) if sequence_parallel else lambda t: t
    layer.weight.data.copy_(cut(uneven(TALL, WIDE, seed=1), cuts["weight"], part))
    x, grad = uneven(TOKENS, 1, WIDE, seed=2), uneven(TOKENS, 1, TALL, seed=3)
    x = cut(x, -1, part) if "x" in cuts else sequence(x)
    grad = cut(grad, -1, part) if "grad" in cuts else sequence(grad)
    seen = Seen()
    with world.Wire() as wire:
        for number in range(passes):
            wire.phase = str(number)
            y, _ = layer(x.clone().requires_grad_())
            y.backward(grad)
    return seen.close(), wire.sent


def attention():
    """The same of the attention of four heads."""
    chosen = world.config(hidden_size=WIDE, num_attention_heads=HEADS)
    layer = DotProductAttention(chosen, 1, AttnMaskType.causal, "self")
    label_layers(torch.nn.ModuleDict({"attention": layer}))
    part = rank_of(layer.tp_group)
    given = [uneven(TOKENS, 1, HEADS, WIDE // HEADS, seed=seed) for seed in (1, 2, 3)]
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)[None, None]
    seen = Seen()
    layer(*(cut(t, 2, part).contiguous() for t in given), hidden)
    return seen.close()


def experts():
    """The same of two experts, the second of which is handed no token."""
    chosen = world.config(
        hidden_size=WIDE,
        num_moe_experts=2,
        moe_ffn_hidden_size=TALL,
        add_bias_linear=False,
        expert_tensor_parallel_size=distributed.get_world_size(),
    )
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = SequentialMLP(2, chosen, linears, groups)
    label_layers(model)
    part = rank_of(groups.expt_tp)
    for number, expert in enumerate(model.local_experts):
        scale = 10.0**number
        first, second = (uneven(TALL, WIDE, seed=s) * scale for s in (1, 2))
        expert.linear_fc1.weight.data.copy_(cut(first, 0, part))
        expert.linear_fc2.weight.data.copy_(cut(second.t(), 1, part))
    seen = Seen()
    tokens = uneven(TOKENS, WIDE, seed=3).requires_grad_()
    y, _ = model(tokens, torch.tensor([TOKENS, 0]), torch.ones(TOKENS))
    y.backward(uneven(TOKENS, WIDE, seed=4))
    return seen.close()


def same(one, two):
    return torch.equal(one.view(torch.int32), two.view(torch.int32))


def compare(spec, seen, whole, *, exact=True):
    """Hold a rank's operands against those that one process makes of the gathered shards."""
    assert seen.operands.keys() == whole.operands.keys()
    narrower, spec = 0, without_alpha(spec)
    for (site, layer, operand), (original, (quantized, _, alpha, _)) in seen.operands.items():
        axis = SITE_AXES[site, operand]
        dim = CUTS[layer.split(".")[-1]].get(operand)
        every = world.gathered(original)
        together = every[0] if dim is None else torch.cat(every, dim)
        if dim is None:
            assert all(same(each, original) for each in every), (site, layer, operand)
        given, (expected, _, factor, _) = whole.operands[site, layer, operand]
        assert math.isclose(alpha, factor, rel_tol=0.0 if exact else 1e-5)
        if exact:
            assert same(together, given), (site, layer, operand)
            assert same(fake_quantize(together, spec, axis=axis), expected)
        else:  # behind another GEMM, whose sums are in another order
            torch.testing.assert_close(together, given)
        mine = fake_quantize(together, spec, axis=axis)
        part = distributed.get_rank(), distributed.get_world_size()
        mine = mine if dim is None else cut(mine, dim, part)
        assert same(quantized, mine.contiguous()), (site, layer, operand)
        alone = fake_quantize(original, spec, axis=axis)
        narrower += dim is not None and not same(alone, quantized)
    # A scale of a rank's own shard is another one, on one of the ranks at least.
    assert sum(world.gathered(narrower)) >= 3
    ranks = merge(world.gathered(seen.measured))
    for found, expected in zip(ranks, whole.measured, strict=True):
        assert found.key == expected.key
        if exact:
            assert (found.amax, found.saturation) == (expected.amax, expected.saturation)
            assert found.scales.keys() == expected.scales.keys()


def compare_terms(seen, whole):
    """Compare the terms of a rank's operands with shards of those that one process makes."""
    assert seen.operands.keys() == whole.operands.keys()
    part, other_scales = (distributed.get_rank(), distributed.get_world_size()), 0
    for (site, layer, operand), (original, rounded) in seen.operands.items():
        expected = whole.operands[site, layer, operand][1].terms
        assert len(rounded.terms) == (1 if operand == "weight" else 2)
        dim = CUTS[layer].get(operand)
        for term, theirs in zip(rounded.terms, expected, strict=True):
            assert term.alpha == theirs.alpha, (site, layer, operand)
            shard = theirs.tensor if dim is None else cut(theirs.tensor, dim, part)
            assert same(term.tensor.contiguous(), shard.contiguous()), (site, layer, operand)
        if dim is not None and operand != "weight":
            mean = original.flatten(0, -2).mean(0)
            amaxes = [tensor.abs().max() for tensor in (mean, original.flatten(0, -2) - mean)]
            own = [alpha_of(amax.item(), QuantSpec("nvfp4")) for amax in amaxes]
            other_scales += torch.tensor(
                [ours != term.alpha for ours, term in zip(own, rounded.terms, strict=True)]
            )
    # A rank's own scale of each term is another one, on one of the ranks at least.
    assert (sum(world.gathered(other_scales)) >= 2).all()


def reductions(sent, phase="0"):
    """How many numbers were reduced in a pass, each of four bytes."""
    return sum(n for (when, what), n in sent.items() if when == phase and what.endswith(" 4 bytes"))


def alone():
    """What each layer's operands are in one process, {kind: {layer: seen}}."""
    made = {}
    for kind in KINDS:
        options(kind)
        made[kind] = {name: linear(name)[0] for name in ("column", "row")}
        made[kind] |= {"attention": attention(), "experts": experts()}
    options(SUM)
    return made | {SUM: {name: linear(name)[0] for name in ("column", "row")}}


def check():
    load_quantizers(Project.here().root / "tools/mqo/quant/recipes/averis.py")
    nearest = PLUGINS[SUM].options | {"rounding": "nearest-even"}
    PLUGINS[SUM] = replace(PLUGINS[SUM], options=nearest)
    wholes = world.alone(alone)
    whole_sum = wholes.pop(SUM)
    with world.groups(tensor_model_parallel_size=2):
        for kind, whole in wholes.items():
            options(kind)
            check_linear(QuantSpec(kind), whole)
            compare(QuantSpec(kind), attention(), whole["attention"], exact=False)
            check_nan()
            check_cache(kind)
            check_packed(kind, whole)
        options(SUM)
        check_terms(whole_sum)
        options("mxfp8")
        _, sent = linear("row")
        assert not reductions(sent), "blocks have scales of their own"
    with world.groups(expert_tensor_parallel_size=2):
        for kind, whole in wholes.items():
            options(kind)
            compare(QuantSpec(kind), experts(), whole["experts"], exact=False)
            _, sent = linear("column")
            assert not sent, "a layer of one rank has nothing to reduce"
        options(SUM)
        assert experts().operands, "the ranks agree on the terms of an expert without tokens"
    print("EQUAL")


def check_linear(spec, whole):
    for name in ("column", "row"):
        for sequence_parallel in (False, True):
            seen, sent = linear(name, sequence_parallel)
            compare(spec, seen, whole[name])
            # The weight twice, and the operand beside it of fprop or dgrad, and of wgrad.
            assert reductions(sent) == 4, sent


def check_terms(whole):
    for name in ("column", "row"):
        for sequence_parallel in (False, True):
            seen, sent = linear(name, sequence_parallel)
            compare_terms(seen, whole[name])
            # The weight twice, and both terms of two operands.
            assert reductions(sent) == 6, sent


def check_cache(kind):
    """A cached weight is reduced when it is quantized: for each of its axes that differ."""
    options(kind, cache_weights="true")
    _, sent = linear("column", passes=2)
    copies = 2 if QuantSpec(kind).block else 1
    assert [reductions(sent, phase) for phase in "01"] == [copies + 2, 2]


def check_packed(kind, whole):
    """An activation that is kept as codes has the scale of the whole, as fprop's operand."""
    for name in ("column", "row"):
        fprop = fake_quantize(whole[name].operands["fprop", name, "x"][0], QuantSpec(kind))
        part = distributed.get_rank(), distributed.get_world_size()
        expected = cut(fprop, -1, part) if "x" in CUTS[name] else fprop
        for sequence_parallel in (False, True):
            options(kind, save_activations='"packed"')
            unpacked, _ = linear(name, sequence_parallel)[0].operands["wgrad", name, "x"]
            assert same(unpacked, expected.contiguous().flatten(0, 1)), (name, sequence_parallel)


def check_nan():
    """One rank's NaN or Inf leaves no rank a scale, and none waiting."""
    chosen = world.config(hidden_size=WIDE)
    layer = ColumnParallelLinear(
        *(WIDE, TALL), config=chosen, init_method=chosen.init_method, bias=False
    )
    label_layers(torch.nn.ModuleDict({"column": layer}))
    for bad in (torch.nan, torch.inf):
        layer.weight.data.fill_(1.0)
        if distributed.get_rank() == 1:
            layer.weight.data[0, 0] = bad
        seen = Seen()
        layer(torch.ones(TOKENS, 1, WIDE))
        _, rounded = seen.close().operands["fprop", "column", "weight"]
        assert rounded.tensor.isnan().all()


world.run(check, processes=2)
