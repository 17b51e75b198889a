"""The rules of recipes: layers with a type, or a recipe, of their own. Needs pydantic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, model_validator

from mqo.quant import excludes
from mqo.quant.formats import NONE
from mqo.quant.frozen_model import FrozenModel
from mqo.quant.layer_rules import Assigned, LayerRule, check_assigned, check_parts

BLOCKS = "decoder.layers"  # the list of transformer blocks in Megatron's models


def _check_end(end: Any) -> Any:
    # bool is an int in Python, and comparisons with NaN are false.
    if type(end) not in (int, float) or not 0 <= end < (1.0 if type(end) is float else 2**16):
        raise ValueError(f"{end!r} is not valid; valid: a number of blocks, or a share below 1.0")
    return end


class Rule(FrozenModel):
    """The type, or the recipe, of some layers.

    They are those of a pattern as in `--exclude`, or parts of transformer blocks, or blocks at
    either end, or parts of these. `first` and `last` are numbers of transformer blocks, or shares
    of all blocks. `recipe` is the name of a recipe, a key of [recipes] in the same file, or a
    FILE.toml relative to it.
    """

    quant_type: str | None = None
    recipe: str | None = None
    layers: str = ""
    parts: tuple[str, ...] = ()
    first: Annotated[int | float, BeforeValidator(_check_end)] = 0
    last: Annotated[int | float, BeforeValidator(_check_end)] = 0

    @model_validator(mode="after")
    def _one_kind(self) -> Rule:
        if bool(self.layers) == (self.is_of_ends or bool(self.parts)):
            raise ValueError("a rule needs either layers, or parts, or first and last")
        check_assigned(self.quant_type, self.recipe)
        check_parts(self.parts)
        if self.layers:
            excludes.check([self.layers])
        return self

    @property
    def assigned(self) -> Assigned:
        """Return what the rule gives its layers."""
        return Assigned(self.quant_type, self.recipe)

    @property
    def is_of_ends(self) -> bool:
        """Return whether the rule is for blocks at the ends."""
        return bool(self.first or self.last)

    @property
    def keeps(self) -> bool:
        """Return whether the rule keeps blocks unquantized."""
        return self.is_of_ends and self.quant_type == NONE and not self.parts

    def blocks(self, count: int) -> list[int]:
        """Return the rule's blocks out of `count`, from 0; shares are rounded, halves up."""
        ends = (self.first, self.last)
        first, last = (
            int(end * count + 0.5) if isinstance(end, float) else min(end, count) for end in ends
        )
        return sorted({*range(first), *range(count - last, count)})

    def rows(
        self, scope: str, path: str = BLOCKS, blocks: Sequence[Iterable[int]] | None = None
    ) -> Iterator[LayerRule]:
        """Yield the rules of quant.toml for a model with layers in the list `path`.

        `blocks` has the indices of each block's layers. If it is None, a rule for blocks at the
        ends is one for any of them. `scope` is the site, or kind of sites, of patterns that name
        none: 'linear:', '' for all.
        """
        patterns = [self.layers or "*"]
        if self.is_of_ends:
            layers: Iterable[int | str] = ["*"]
            if blocks is not None:
                layers = [layer for at in self.blocks(len(blocks)) for layer in blocks[at]]
            patterns = [f"{path}.{layer}.*" for layer in layers]
        for pattern in patterns:
            whole = pattern if ":" in pattern else f"{scope}{pattern}"
            yield LayerRule(whole, self.quant_type, self.recipe, self.parts)
