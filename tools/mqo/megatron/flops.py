"""Count the FLOPs of multi-latent attention in a HybridModel, which upstream leaves out."""

import copy
from argparse import Namespace
from collections.abc import Callable
from typing import Any

Count = Callable[..., float]


def with_latent_attention(of_layers: Count, args: Namespace, of_model: Count) -> Count:
    """Return a function like `of_layers` that adds the FLOPs of MLA's layers.

    They are those of a GPT of these layers without MLPs and without a vocabulary.

    Args:
        of_layers: upstream's count of a HybridModel's layers, without MLA.
        args: upstream's arguments.
        of_model: upstream's count of the model in the arguments.
    """
    from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols, get_hybrid_layer_counts

    alone = copy.copy(args)
    alone.num_layers = get_hybrid_layer_counts(args.hybrid_layer_pattern)[Symbols.MLA]
    alone.hybrid_layer_pattern = alone.num_experts = alone.mtp_num_layers = None
    alone.ffn_hidden_size = alone.padded_vocab_size = 0

    def count(*, total_tokens: float, seqlen_squared_sum: float, **sizes: Any) -> float:
        lengths = {"total_tokens": total_tokens, "seqlen_squared_sum": seqlen_squared_sum}
        flops = of_layers(**lengths, **sizes)
        return flops + of_model(alone, 0, seqlen_squared_sum, total_tokens) * bool(alone.num_layers)

    return count
