"""Count the weights of a rank. A test compares the count with upstream's model on meta tensors."""

from collections import Counter
from dataclasses import dataclass

from mqo.matrix.layer_pattern import ATTENTIONS, MAMBA, MLP, MOE
from mqo.matrix.tables import Mamba, Shape
from mqo.scale.layout import Layout

VOCABULARY_MULTIPLE = 128  # --make-vocab-size-divisible-by
MAMBA_TAPS = 4  # of the convolution in upstream's Mamba layers


@dataclass(frozen=True)
class Weights:
    """The weights of one rank: those that all data-parallel ranks hold, and those of its experts.

    `linear` is the number of weights in linear layers, including the head; `largest` is the number
    in the largest weight.
    """

    dense: int
    expert: int
    linear: int
    largest: int


def padded_vocabulary(model: Shape, layout: Layout) -> int:
    """Return the rows of the embedding, padded as upstream does for tensor-parallel ranks."""
    multiple = VOCABULARY_MULTIPLE * layout.tensor
    return -(-model.vocab_size // multiple) * multiple


def rank_weights(model: Shape, layout: Layout, stage: int) -> Weights:
    """Return the weights of a rank of pipeline stage `stage`."""
    hidden, tensor = model.hidden_size, layout.tensor
    last = stage == layout.pipeline - 1
    table = padded_vocabulary(model, layout) * hidden // tensor
    # A tied embedding is also the head, and the last of several stages has a copy of it.
    tables = (stage == 0) + last * (layout.pipeline > 1 or not model.tied_embeddings)
    count = Counter("".join(layout.layers(model, stage)))
    attention, sparse = sum(count[kind] for kind in ATTENTIONS), count[MOE]
    linear = attention * _attention(model, tensor) + last * table
    linear += count[MLP] * _mlp(model, model.ffn_hidden_size) // tensor
    norms = count.total() * hidden + attention * _vectors(model, tensor)
    first = (model.mlp_matrices - 1) * hidden * model.ffn_hidden_size  # gate and up are one weight
    largest = max(table * bool(tables), first // tensor)
    if model.mamba:
        projection = model.mamba.projection_size * hidden // tensor
        linear += count[MAMBA] * (projection + model.mamba.inner_size * hidden // tensor)
        norms += count[MAMBA] * _mamba_vectors(model.mamba) // tensor
        largest = max(largest, projection)
    expert = routers = 0
    if model.moe:
        linear += sparse * _mlp(model, model.moe.shared_ffn_size) // tensor
        each = _mlp(model, model.moe.expert_ffn_size) // tensor
        expert = sparse * model.moe.num_experts // layout.expert * each
        routers = sparse * hidden * model.moe.num_experts
    lookup = table * (tables - last)
    return Weights(
        dense=linear + lookup + norms + last * hidden + routers,
        expert=expert,
        linear=linear + expert,
        largest=largest,
    )


def total_weights(model: Shape) -> int:
    """Return the number of weights of the whole model, without rows of padding."""
    layout = Layout(1)
    weights = rank_weights(model, layout, 0)
    rows = (padded_vocabulary(model, layout) - model.vocab_size) * (2 - model.tied_embeddings)
    return weights.dense + weights.expert - rows * model.hidden_size


def _mlp(model: Shape, width: int) -> int:
    """Return the number of weights of up, down and, if there is one, the gate."""
    return model.mlp_matrices * model.hidden_size * width


def _attention(model: Shape, tensor: int) -> int:
    """Return the weights in attention's projections; MLA's down projection is not split."""
    hidden, heads, mla = model.hidden_size, model.num_attention_heads, model.mla
    if mla is None:
        groups = 2 * (model.num_query_groups or heads)
        return (2 * heads + groups) * model.head_size * hidden // tensor
    down = hidden * (mla.kv_lora_rank + mla.qk_pos_emb_head_dim)
    query = hidden * (mla.qk_head_dim + mla.qk_pos_emb_head_dim)
    up = mla.kv_lora_rank * (mla.qk_head_dim + mla.v_head_dim)
    return down + heads * (query + up + mla.v_head_dim * hidden) // tensor


def _vectors(model: Shape, tensor: int) -> int:
    """Return the weights of attention's own norms, and of the biases of q, k and v."""
    if model.mla is not None:
        return model.mla.kv_lora_rank
    parts = model.num_attention_heads + 2 * (model.num_query_groups or model.num_attention_heads)
    biases = model.qkv_bias * parts * model.head_size // tensor
    return biases + 2 * model.qk_norm * model.head_size


def _mamba_vectors(mamba: Mamba) -> int:
    """Return the weights of a convolution, its norm, and the three numbers of each head."""
    return mamba.conv_size * (MAMBA_TAPS + 1) + mamba.inner_size + 3 * mamba.num_heads
