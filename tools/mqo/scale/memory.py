"""Compute the memory of a GPU at a layout, in bytes and by part, for training with Adam.

The activations of a layer are the tensors that autograd saves in upstream's local implementation
on CUDA: activations in one kernel, attention without the s x s scores, no dropout. A test counts
the same tensors on the CPU.
"""

from collections.abc import Set
from dataclasses import dataclass, fields
from typing import Literal

from mqo.matrix.layer_pattern import ATTENTIONS, MAMBA, MOE
from mqo.matrix.tables import NONE, Dtype, Mamba, Shape, Training
from mqo.megatron.attention import chunks
from mqo.quant import formats
from mqo.scale.devices import GIB
from mqo.scale.layout import Layout
from mqo.scale.weights import Weights, padded_vocabulary, rank_weights

# How local attention runs: in chunks if PV has a type, unfused if the user's flags need it;
# core_attn is attention that is recomputed as a whole.
Attention = Literal["fused", "chunked", "unfused", "core_attn"]

BF16, FP32 = 2, 4
MAMBA_CHUNK = 128  # tokens of a chunk in upstream's Mamba layers
# Main weights and Adam's two moments, in fp32; the distributed optimizer shares them out.
OPTIMIZER = 3 * FP32
# A model in fp32 is its own main weights.
WIDTH: dict[Dtype, int] = {"bf16": BF16, "fp16": BF16, "fp32": FP32}
STATES: dict[Dtype, int] = {"bf16": OPTIMIZER, "fp16": OPTIMIZER, "fp32": OPTIMIZER - FP32}
# Tensors of logits at the peak of the loss: the logits and their gradient (mqo/megatron/losses).
LOGITS = 2
# Unfused attention keeps the probabilities for backward, and with a type in PV the rounded ones.
SCORE_KEPT = 2 * BF16
# Once per GPU: upstream's buffer, and a product or gradient of the current layer.
SCORE_WORKING = 2 * BF16
# An allowance: the tokens of a rank's experts relative to an even share. The router's loss balances
# them, but no step is exactly even.
UNEVEN = 1.5
# An allowance, not a count: CUDA's context, NCCL's and cuBLAS's buffers.
CONTEXT = 3 * GIB


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of a run, as far as it affects memory.

    linear: the type of fprop's input. copies: bytes per weight of a linear layer's rounded copies,
    0 if no copy is kept. attention: how local attention runs. backward: the products of its
    backward pass that have a type.
    """

    linear: str = NONE
    copies: int = 0
    attention: Attention = "fused"
    backward: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU. The total is an upper bound: not all parts reach their maximum together.

    `working` is what the backward pass of one layer needs in addition: recomputed values, the bf16
    gradient of its weight and rounded operands. Two are not part of the total: --cache-weights
    would add `cache`, and --save-activations packed would subtract `packed` from `activations`.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    scores: int
    logits: int
    working: int
    context: int
    cache: int
    packed: int

    @property
    def total(self) -> int:
        """Return the sum of the parts without `cache` and `packed`."""
        parts = sum(getattr(self, field.name) for field in fields(self))
        return parts - self.cache - self.packed


def stage_memory(
    model: Shape,
    training: Training,
    arithmetic: Arithmetic,
    layout: Layout,
    stage: int,
    dtype: Dtype = "bf16",
    *,
    uneven: float | None = None,
) -> Memory:
    """Return the memory of a GPU of a pipeline stage.

    `uneven` is a rank's tokens for experts relative to an even share: UNEVEN by default.
    """
    weights, width = rank_weights(model, layout, stage), WIDTH[dtype]
    count = weights.dense + weights.expert
    layers = layout.layers(model, stage)
    attentions = sum(part in ATTENTIONS for layer in layers for part in layer)
    attention, linear = arithmetic.attention, arithmetic.linear
    if layout.recompute == "core_attn":
        attention = "core_attn"
    tokens = training.micro_batch * training.sequence // (layout.tensor * layout.context)
    if uneven is None:
        uneven = UNEVEN if layout.expert > 1 else 1
    kept = [width * tokens * layer_values(model, i, attention, uneven=uneven) for i in layers]
    less = [layer_packed(model, i, attention, linear, uneven=uneven, width=width) for i in layers]
    again = max(kept) if layout.recompute == "full" else 0
    if layout.recompute == "full":
        kept = [width * tokens * model.hidden_size] * len(layers)
        less = []  # inputs of whole layers are not inputs of linear layers
    last = stage == layout.pipeline - 1
    micro_batches = training.global_batch // (training.micro_batch * layout.data)
    in_flight = min(layout.pipeline - stage, micro_batches)
    scored = attentions * in_flight if layout.recompute == "none" else 1
    rounded = _rounded(model, training, layout, weights) * (arithmetic.copies > 0)
    chunks = 0
    if arithmetic.attention == "chunked":
        chunks = _chunks(model, training, layout, width)
        chunks += width * _rounded_in_backward(model, training, layout, arithmetic.backward)
    scores = _scores(model, training, layout, scored, width) * (arithmetic.attention == "unfused")
    ends = width * tokens * model.hidden_size * 2 * last  # the last norm's input and output
    head = _saved(model.hidden_size, model.hidden_size, linear, width) * last
    return Memory(
        weights=width * count,
        gradients=FP32 * count,
        optimizer=_states(weights, layout, dtype),
        activations=in_flight * sum(kept) + ends,
        scores=scores,
        logits=LOGITS * width * tokens * padded_vocabulary(model, layout) * last,
        working=again + width * (weights.largest + rounded) + chunks,
        context=CONTEXT,
        cache=arithmetic.copies * weights.linear,
        packed=round(tokens * (in_flight * sum(less) + head)),
    )


def _states(weights: Weights, layout: Layout, dtype: Dtype) -> int:
    """Return the bytes of the optimizer's states, divided among copies if they are sharded."""
    dense, expert = (layout.copies, layout.expert_copies) if layout.sharded else (1, 1)
    each = STATES[dtype]
    return each * weights.dense // dense + each * weights.expert // expert


def layer_values(model: Shape, layer: str, attention: Attention, *, uneven: float = 1) -> int:
    """Return the number of values per token that a layer keeps for backward, without scores.

    `layer` are the symbols of its parts; each part has a norm, which keeps its input and its
    output, the input of the next linear layers. The rotation keeps sines and cosines, twice, per
    sequence: counted per token, as for micro-batches of one sequence. `uneven` is a rank's tokens
    for experts relative to an even share.
    """
    values = 2 * model.hidden_size * len(layer)
    for part in layer:
        if part in ATTENTIONS:
            kept, rotated = (_latent if model.mla else _grouped)(model, attention)
            values += kept + 4 * rotated
        elif part == MAMBA:
            assert model.mamba is not None
            values += _mamba(model.mamba)
        else:
            values += _experts(model, uneven) if part == MOE else _mlp(model, model.ffn_hidden_size)
    return values


def layer_packed(
    model: Shape,
    layer: str,
    attention: Attention,
    linear: str,
    *,
    uneven: float = 1,
    width: int = BF16,
) -> float:
    """Return the bytes per token that a layer saves by keeping its linear inputs as codes.

    Each linear layer has its own codes, even two layers with the same input (the first ones of
    latent attention). An input that another operation also keeps is not freed, so its codes add to
    it: fused attention keeps its output, unless values were padded, and a router keeps its input.
    Experts pack like other linear layers.
    """
    inputs = (_linear_inputs(model, part, attention, uneven) for part in layer)
    return sum(_saved(freed, codes, linear, width) for freed, codes in inputs)


def _linear_inputs(model: Shape, part: str, attention: Attention, uneven: float) -> tuple[int, int]:
    """Return the freed values and the codes per token of the linear inputs of a layer's part."""
    if part in ATTENTIONS:
        return _attention_inputs(model, attention)
    if part != MAMBA:
        return _mlp_inputs(model, part, uneven)
    assert model.mamba is not None
    size = model.hidden_size + model.mamba.inner_size
    return size, size


def _attention_inputs(model: Shape, attention: Attention) -> tuple[int, int]:
    """Return the freed values and the codes per token of attention's linear inputs."""
    hidden, mla = model.hidden_size, model.mla
    if mla is None:
        return hidden + model.heads_size * (attention != "fused"), hidden + model.heads_size
    context = mla.kv_lora_rank + model.num_attention_heads * mla.v_head_dim
    return hidden + context, 2 * hidden + context


def _mlp_inputs(model: Shape, part: str, uneven: float) -> tuple[int, int]:
    """Return the freed values and the codes per token of the linear inputs of an MLP or experts."""
    hidden = model.hidden_size
    if part != MOE:
        return hidden + model.ffn_hidden_size, hidden + model.ffn_hidden_size
    moe = model.moe
    assert moe is not None
    own = moe.shared_ffn_size + int(uneven * moe.topk * (hidden + moe.expert_ffn_size))
    return own, hidden + own


def _saved(freed: int, codes: int, linear: str, width: int) -> float:
    """Return the bytes saved by replacing this number of values by this number of codes."""
    kind = formats.FORMATS.get(linear)  # a custom quantizer has no codes
    return width * freed - kind.packed_bytes * codes if kind else 0


def _grouped(model: Shape, attention: Attention) -> tuple[int, int]:
    """Return the size of query, key, value and context per token, and the rotated width.

    Norms of queries and keys keep their input, and one fp32 number per head. Fused attention also
    keeps one fp32 number per head; unfused repeats keys and values for all heads; chunked keeps
    only the operands; recomputed keeps the value as a view of the projection.
    """
    heads, groups = model.num_attention_heads, model.num_query_groups or 0
    head = model.head_size
    norms = model.qk_norm * (heads + groups) * (head + FP32 // BF16)
    values = {
        "fused": 2 * (heads + groups) * head + heads * FP32 // BF16,
        "chunked": 2 * (heads + groups) * head,
        "unfused": 4 * heads * head,
        "core_attn": 3 * (heads + groups) * head,
    }
    return norms + values[attention], head


def _latent(model: Shape, attention: Attention) -> tuple[int, int]:
    """Return the same sizes for MLA, plus the latents before and after their norm.

    Fused attention pads values to the size of keys.
    """
    mla, heads = model.mla, model.num_attention_heads
    assert mla is not None
    key, value = _head_sizes(model)
    fused = 4 * key + value + FP32 // BF16
    latents = 2 * mla.kv_lora_rank + mla.qk_pos_emb_head_dim
    each = fused if attention == "fused" else 2 * key + 2 * value
    return latents + heads * each, mla.qk_pos_emb_head_dim


def _mamba(mamba: Mamba) -> int:
    """Return the number of values per token that a Mamba layer keeps, without its first norm.

    They are those of the scan in torch, which keeps fp32 copies of its operands and, in a chunk,
    the decay between all tokens. mamba_ssm keeps less.
    """
    projections = mamba.num_groups * mamba.state_dim
    within = (2 * mamba.num_heads + mamba.num_groups) * MAMBA_CHUNK
    states = 2 * mamba.inner_size * mamba.state_dim // MAMBA_CHUNK
    scan = 11 * mamba.inner_size + 4 * projections + within + states
    return FP32 // BF16 * (2 * mamba.conv_size + scan) + mamba.inner_size


def _mlp(model: Shape, width: int) -> int:
    """Return the number of values per token of gate, up and their product, or of ReLU and square.

    The last is the input of the down projection.
    """
    return model.mlp_matrices * width


def _experts(model: Shape, uneven: float) -> int:
    """Return the number of values per token of a token's experts.

    Experts have their own inputs. A router keeps some numbers per expert.
    """
    moe = model.moe
    assert moe is not None
    routed = moe.topk * (model.hidden_size + _mlp(model, moe.expert_ffn_size))
    return (
        _mlp(model, moe.shared_ffn_size) + int(uneven * routed) + 2 * FP32 // BF16 * moe.num_experts
    )


def _scores(model: Shape, training: Training, layout: Layout, kept: int, width: int) -> int:
    """Return the bytes of all s x s tensors of unfused attention, which `kept` layers keep."""
    heads = model.num_attention_heads // layout.tensor
    matrix = training.micro_batch * heads * training.sequence**2 // layout.context
    return matrix * (SCORE_KEPT * kept + SCORE_WORKING) * width // BF16


def _chunks(model: Shape, training: Training, layout: Layout, width: int) -> int:
    """Return the bytes of working memory of attention in chunks, in backward.

    They are the buffers of scores, and keys and values by head with their gradients in fp32.
    """
    heads, sequence, groups = model.num_attention_heads, training.sequence, _groups(model)
    queries = sequence // layout.context
    span = chunks.Span(0, queries, sequence - queries)
    scores = chunks.ChunkPlan(
        matrices=training.micro_batch * groups // layout.tensor,
        repeats=heads // groups,
        queries=queries,
        keys=sequence,
        visible=chunks.Visible((span,)),
        block=1,
        device="cuda",
    ).elements
    # Unnormalized probabilities need one more buffer, in the scores' dtype.
    buffers = scores * (4 * FP32 if width == FP32 else 3 * width + 3 * FP32)
    values = training.micro_batch * sequence * groups // layout.tensor * sum(_head_sizes(model))
    return buffers + (width + FP32) * values


def _rounded_in_backward(
    model: Shape, training: Training, layout: Layout, backward: Set[str]
) -> int:
    """Return a bound of the values that the typed products of attention's backward pass round.

    A product may have a copy of its queries, of the context's gradient, or of its keys. `_chunks`
    has the keys of one product and the values of one.
    """
    heads, (key, value) = model.num_attention_heads, _head_sizes(model)
    query = heads * key * len(backward & {"qk_recompute", "dk"})
    grad = heads * value * len(backward & {"dp", "dv"})
    keys = _groups(model) * key * bool(backward & {"qk_recompute", "dq"})
    tokens = training.micro_batch * training.sequence // layout.context
    return tokens * (query + grad + keys) // layout.tensor


def _head_sizes(model: Shape) -> tuple[int, int]:
    """Return the size of a key and of a value of one head."""
    if model.mla is None:
        return model.head_size, model.head_size
    return model.mla.qk_head_dim + model.mla.qk_pos_emb_head_dim, model.mla.v_head_dim


def _groups(model: Shape) -> int:
    """Return the number of heads of keys and values."""
    return (None if model.mla else model.num_query_groups) or model.num_attention_heads


def _rounded(model: Shape, training: Training, layout: Layout, weights: Weights) -> int:
    """Return the number of rounded values of one linear layer: the largest weight, and its input.

    Those of attention are fewer, and are left out.
    """
    tokens = training.micro_batch * training.sequence // layout.context
    return weights.largest + tokens * model.hidden_size
