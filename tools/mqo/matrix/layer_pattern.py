"""Read a pattern of layers, and group its layers to blocks.

Upstream's HybridModel has a layer for each symbol: attention (`*`), MLA (`+`), Mamba-2 (`M`), an
MLP (`-`) or experts (`E`). A `|` ends a pipeline stage. A block is a mixer (attention, MLA or
Mamba-2) and the layers after it up to the next mixer, so `*-*-` has the two blocks of a GPT with
two layers, and `MM-*` has the three blocks `M`, `M-` and `*`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mqo.errors import MqoError

FLAG = "--hybrid-layer-pattern"
ATTENTION, MLA, MAMBA, MLP, MOE, STAGE = "*", "+", "M", "-", "E", "|"
ATTENTIONS = (ATTENTION, MLA)
MIXERS = (*ATTENTIONS, MAMBA)
_LAYERS = {ATTENTION: "attention", MLA: "MLA", MAMBA: "Mamba", MLP: "MLP", MOE: "experts"}
_VALID = ", ".join(f"{symbol} ({layer})" for symbol, layer in _LAYERS.items())
_EXPECTED = f"{_VALID}, and {STAGE} between pipeline stages"
# Symbols of upstream that this project does not train.
_UNSUPPORTED = {
    "G": "gated delta nets",
    "D": "sparse attention",
    "/": "multi-token prediction",
}


class PatternError(MqoError):
    """A pattern of layers is not valid, or not one of a model that is trained here."""


def check(pattern: str, given: Mapping[str, bool]) -> None:
    """Raise PatternError if a pattern is not valid.

    `given` says for some symbols whether the model has the sizes of their layers.
    """
    for symbol in pattern:
        if symbol not in (*_LAYERS, STAGE):
            kind = f", {_UNSUPPORTED[symbol]}" if symbol in _UNSUPPORTED else ""
            raise PatternError(
                f"The layer pattern {pattern} has {symbol!r}{kind}, which is not supported",
                expected=_EXPECTED,
            )
    if "" in pattern.split(STAGE):
        raise PatternError(
            f"The layer pattern {pattern!r} has a pipeline stage without layers", expected=_EXPECTED
        )
    for symbol, has_sizes in given.items():
        if (symbol in pattern) != has_sizes:
            layers = _LAYERS[symbol]
            raise PatternError(
                f"The layer pattern {pattern} has no {layers} ({symbol}), but the model has them"
                if has_sizes
                else f"The layer pattern {pattern} has {layers} ({symbol}), but the model has none",
                expected="a pattern with the layers of the model",
            )


def blocks_of(pattern: str) -> tuple[str, ...]:
    """Return the symbols of each block; layers before the first mixer are a block, too."""
    blocks: list[str] = []
    for symbol in pattern.replace(STAGE, ""):
        if symbol in MIXERS or not blocks:
            blocks.append(symbol)
        else:
            blocks[-1] += symbol
    return tuple(blocks)


def layers_of(blocks: Sequence[str]) -> tuple[range, ...]:
    """Return the indices of each block's layers in upstream's `decoder.layers`."""
    ends = [0]
    for block in blocks:
        ends.append(ends[-1] + len(block))
    return tuple(map(range, ends, ends[1:]))


def in_stages(pattern: str, stages: int) -> str:
    """Return the pattern with a `|` between pipeline stages.

    A pattern that has `|` keeps them, and may have several segments for each stage. Else the stages
    share the blocks equally.

    Raises:
        PatternError: segments or blocks cannot be divided among the stages.
    """
    segments = pattern.split(STAGE)
    if stages == 1:
        return "".join(segments)
    if len(segments) > 1 and len(segments) % stages == 0:
        return pattern
    blocks = blocks_of(pattern)
    if len(segments) > 1 or len(blocks) % stages:
        parts = f"{len(segments)} segments" if len(segments) > 1 else f"{len(blocks)} blocks"
        raise PatternError(
            f"The layer pattern {pattern} has {parts}, which {stages} pipeline stages cannot share",
            expected=f"a multiple of {stages}, or {STAGE} between the stages",
            help=f"Change --pipeline-model-parallel-size or {FLAG}",
        )
    size = len(blocks) // stages
    return STAGE.join("".join(blocks[at : at + size]) for at in range(0, len(blocks), size))


def stages_of(pattern: str, stages: int) -> tuple[str, ...]:
    """Return the layers of each pipeline stage; PatternError as for `in_stages`.

    If there are several segments for each stage, the stages take them in turn.
    """
    segments = in_stages(pattern, stages).split(STAGE)
    return tuple("".join(segments[stage::stages]) for stage in range(stages))


def is_virtual(pattern: str, stages: int) -> bool:
    """Return whether each pipeline stage has several segments, which run interleaved."""
    return in_stages(pattern, stages).count(STAGE) >= stages
