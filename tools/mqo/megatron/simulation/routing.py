"""How many tokens each expert gets: an input, since a router's choice needs data."""

from typing import Any

import numpy as np
from torch import Tensor


def with_counts(imbalance: float) -> None:
    """Make upstream's dispatchers send a number of tokens set by `imbalance`, dropping none.

    This rank's experts get `imbalance` times their even share of each rank's tokens; the other
    ranks' experts share the rest evenly. The dispatchers get these counts instead of reading the
    routing map.
    """
    from megatron.core.transformer.moe import token_dispatcher as upstream

    class Given(upstream.MoEAlltoAllTokenDispatcher):
        def preprocess(self, routing_map: Tensor) -> np.ndarray:
            super().preprocess(routing_map)  # whose work counts, and whose numbers do not
            return _give(self, routing_map, imbalance)

    class GivenByAllGather(upstream.MoEAllGatherTokenDispatcher):
        def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple:
            return _gathered(self, hidden_states, probs, imbalance)

    from megatron.core.transformer.moe import moe_layer

    moe_layer.MoEAlltoAllTokenDispatcher = Given
    moe_layer.MoEAllGatherTokenDispatcher = GivenByAllGather


def local_counts(rows: int, ranks: int, experts: int, imbalance: float) -> np.ndarray:
    """Return the rows that each of a rank's experts gets, of `rows` that go to `ranks` ranks."""
    own = min(rows, round(imbalance * rows / ranks)) if ranks > 1 else rows
    return shares(own, experts)


def shares(rows: int, parts: int) -> np.ndarray:
    """Return rows shared out evenly, the first parts getting one more."""
    return np.array([rows // parts + (i < rows % parts) for i in range(parts)])


def _give(dispatcher: Any, routing_map: Tensor, imbalance: float) -> np.ndarray:
    """Set what an all-to-all dispatcher sends and receives; return its experts' tokens."""
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
    # Which chunk comes first changes nothing that is counted, and chunks differ by a row at most.
    order = np.arange(tensor * ranks * experts)
    dispatcher.sort_input_by_local_experts = dispatcher.restore_output_by_local_experts = order
    return counts * tensor * ranks


def _gathered(dispatcher: Any, hidden: Tensor, probs: Tensor, imbalance: float) -> tuple:
    """Pick the rows of a rank's experts from all ranks' tokens, which were gathered."""
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
