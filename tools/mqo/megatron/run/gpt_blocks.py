"""Describe models by a pattern of layers, from upstream's arguments, and rename their weights.

A block of a GPT is two layers of a HybridModel: `*` (attention) or `+` (MLA), then `-` (an MLP) or
`E` (experts). So a GPT and a HybridModel with the same pattern have the same weights. This module
needs only the standard library, because `mqo` loads it without torch.
"""

import re
from collections.abc import Mapping
from typing import Any

PATTERN = "hybrid_layer_pattern"
MOST_LAYERS = 1 << 15  # twice the blocks of the largest GPT that is built from a checkpoint
# Of a checkpoint; | is between pipeline stages.
VALID = re.compile(rf"[*+\-EM|]{{1,{MOST_LAYERS}}}")
FRESH = "M"  # layers that no GPT has; they start with random weights
# The number of a layer or block, and the name after it.
NUMBER = re.compile(r"(?<=decoder\.layers\.)(\d+)(?=\.(\w+))")
_ATTENTION = ("input_layernorm", "self_attention")
_NORMS = ("decoder.final_layernorm.", "decoder.final_norm.")  # of a GPT, and of a HybridModel
_BLOCKS = re.compile(r"([*+][-E])+")


def given_pattern(args: Mapping[str, Any]) -> str | None:
    """Return the pattern of a HybridModel without its pipeline stages; None for a GPT."""
    pattern = args.get(PATTERN) or args.get("hybrid_override_pattern")
    return pattern.replace("|", "") if pattern else None


def has_sizes(pattern: str, args: Mapping[str, Any]) -> bool:
    """Return whether the arguments of a HybridModel have the sizes of its layers, and no others."""
    latent = bool(args.get("multi_latent_attention"))
    sparse = bool(args.get("num_experts"))
    return ("+" in pattern, "E" in pattern) == (latent, sparse) and not ("*" in pattern and latent)


def gpt_pattern(args: Mapping[str, Any]) -> str:
    """Return the pattern of a GPT's layers, by its arguments."""
    attention = "+" if args.get("multi_latent_attention") else "*"
    mlps = "".join("E" if sparse else "-" for sparse in _sparse_blocks(args))
    return "".join(attention + mlp for mlp in mlps)


def _sparse_blocks(args: Mapping[str, Any]) -> list[bool]:
    """Return whether each block has experts."""
    blocks, every = args["num_layers"], args.get("moe_layer_freq") or 1
    if not args.get("num_experts"):
        return [False] * blocks
    if isinstance(every, list):
        return list(map(bool, every))
    return [n % every == 0 for n in range(blocks)]


def as_gpt(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the GPT that has a HybridModel's weights; those of a GPT as they are.

    Raises:
        ValueError: no GPT has the pattern.
    """
    pattern = given_pattern(args)
    if pattern is None:
        return dict(args)
    if not _BLOCKS.fullmatch(pattern):
        raise ValueError(f"no GPT has the layers {pattern}")
    sparse = [int(mlp == "E") for mlp in pattern[1::2]]
    frequency = {"moe_layer_freq": sparse} if any(sparse) else {}
    none = {PATTERN: None, "hybrid_override_pattern": None}
    return {**args, **none, "num_layers": len(sparse), **frequency}


def hybrid_name(name: str) -> str:
    """Return a HybridModel's name of a GPT's weight: block i is the layers 2i and 2i+1."""

    def layer(match: re.Match[str]) -> str:
        return str(2 * int(match[1]) + (match[2] not in _ATTENTION))

    return NUMBER.sub(layer, name).replace(*_NORMS)


def gpt_name(name: str, blocks: Mapping[int, int]) -> str:
    """Return a GPT's name of a HybridModel's weight; `blocks` has the block of each layer."""
    theirs, ours = _NORMS
    return NUMBER.sub(lambda match: str(blocks[int(match[1])]), name).replace(ours, theirs)
