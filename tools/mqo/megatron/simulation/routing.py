"""Set the number of tokens of each expert, because a router's choice needs data."""

from typing import Any

import numpy as np
from torch import Tensor


def with_counts(imbalance: float) -> None:
    """Make upstream's dispatchers send the number of tokens that `imbalance` sets; none is dropped.

    This rank's experts get `imbalance` times their even share of each rank's tokens; the other
    ranks' experts share the rest evenly. The dispatchers get these counts instead of reading the
    routing map.
    """
    from megatron.core.transformer.moe import token_dispatcher as upstream

    class Given(upstream.MoEAlltoAllTokenDispatcher):
        def preprocess(self, routing_map: Tensor) -> np.ndarray:
            super().preprocess(routing_map)  # counts its work; its results are replaced
            return _give(self, routing_map, imbalance)

    class GivenByAllGather(upstream.MoEAllGatherTokenDispatcher):
        def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple:
            return _gathered(self, hidden_states, probs, imbalance)

    from megatron.core.transformer.moe import moe_layer

    moe_layer.MoEAlltoAllTokenDispatcher = Given
    moe_layer.MoEAllGatherTokenDispatcher = GivenByAllGather


def local_counts(rows: int, ranks: int, experts: int, imbalance: float) -> np.ndarray:
    """Return the number of rows of each expert of a rank, if `ranks` ranks share `rows`."""
    own = min(rows, round(imbalance * rows / ranks)) if ranks > 1 else rows
    return shares(own, experts)


def shares(rows: int, parts: int) -> np.ndarray:
    """Split `rows` evenly; the first parts get one more if needed."""
    return np.array([rows // parts + (i < rows % parts) for i in range(parts)])


def _give(dispatcher: Any, routing_map: Tensor, imbalance: float) -> np.ndarray:
    """Set the sizes of an all-to-all dispatcher's exchanges; return its experts' tokens."""
    ranks, tensor = dispatcher.ep_size, dispatcher.tp_size
    experts, own_rank = dispatcher.num_local_experts, dispatcher.ep_group.rank()
    rows = routing_map.size(0) * dispatcher.config.moe_router_topk
    counts = local_counts(rows, ranks, experts, imbalance)
    others = iter(shares(rows - int(counts.sum()), max(1, ranks - 1)))
    sent = [counts.sum() if rank == own_rank else next(others) for rank in range(ranks)]
    dispatcher.num_out_tokens = rows
    if ranks > 1 or tensor > 1:
        dispatcher.input_splits = np.array(sent)
        dispatcher.output_splits = np.full(ranks, counts.sum())
        dispatcher.output_splits_tp = np.full(tensor, ranks * counts.sum())
    dispatcher.num_global_tokens_per_local_expert = np.tile(counts, (tensor * ranks, 1))
    # The order of chunks changes no count, and chunks differ by at most one row.
    order = np.arange(tensor * ranks * experts)
    dispatcher.sort_input_by_local_experts = dispatcher.restore_output_by_local_experts = order
    return counts * tensor * ranks


def _gathered(dispatcher: Any, hidden: Tensor, probs: Tensor, imbalance: float) -> tuple:
    """Select the rows of a rank's experts from the gathered tokens of all ranks."""
    from megatron.core.transformer.moe.moe_utils import permute

    own = slice(dispatcher.local_expert_indices[0], dispatcher.local_expert_indices[-1] + 1)
    rows = hidden.size(0) * dispatcher.config.moe_router_topk
    counts = local_counts(rows, dispatcher.ep_size, dispatcher.num_local_experts, imbalance)
    dispatcher.hidden_shape_before_permute = hidden.shape
    dispatcher.local_map = dispatcher.routing_map[:, own].contiguous()
    picked, _, mapping, _, _ = permute(
        hidden,
        dispatcher.local_map,
        num_out_tokens=int(counts.sum()),
        fused=dispatcher.config.moe_permute_fusion,
    )
    dispatcher.reversed_local_input_permutation_mapping = mapping
    dispatcher.local_probs = probs[:, own].T.reshape(-1)[: counts.sum()].clone()
    dispatcher.routing_map = None
    return picked, counts, dispatcher.local_probs
