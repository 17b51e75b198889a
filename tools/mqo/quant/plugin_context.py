"""What a custom quantizer may read in addition to its tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mqo.quant.plugin_states import Operand, PluginStates
from mqo.quant.plugins import MOST_VALUES, Plugin
from mqo.quant.spec import QuantSpec
from mqo.quant.stochastic import RANDOM_BITS, draws
from mqo.quant.tensor_amax import largest

# Returns the amax over ranks of a tensor of which they hold shards; None if this one is whole.
Share = Callable[[Tensor], Tensor | None]


class QuantizerError(RuntimeError):
    """A custom quantizer failed, or returned another result than a rounded tensor."""


@dataclass(frozen=True)
class CallSite:
    """The operand for which a quantizer is called; without arguments, a tensor of no model.

    Attributes:
        key: site, layer and operand.
        step: the number of completed steps.
        states: those of the model. None gives the initial state, and drops notes.
        share: the amax over ranks, for `QuantizerContext.largest`.
        shared_seed: the seed that both operands of the GEMM have; None for one from the operand's.
    """

    key: Operand = ("", "", "")
    step: int = 0
    states: PluginStates | None = None
    share: Share | None = None
    shared_seed: int | None = None


class Random(NamedTuple):
    """The random numbers of a call: one for each element, further seeds, and that of the GEMM."""

    elements: Tensor
    seeds: Iterator[int]
    shared_seed: int


@dataclass(frozen=True)
class QuantizerContext:
    """What a quantizer may read in addition to its tensor.

    Attributes:
        site, layer, operand: the GEMM, such as 'fprop', the layer's name, and the operand, such as
            'weight'; '' outside of a model.
        step: the number of completed steps.
        tile: 'row', or 'square' if the scales should be those of squares.
        options: {name: value} of all options that the quantizer declares.
        state: {name: float32 tensor} of the operand. It is constant within a step.

    Examples:
        >>> @quantizer("grid", options={"step": 0.5})
        ... def grid(x, context):
        ...     return (x / context.options["step"]).round() * context.options["step"]
        >>> fake_quantize(torch.tensor([0.3]), QuantSpec("grid", options={"step": 0.25}))
        tensor([0.2500])
    """

    site: str
    layer: str
    operand: str
    step: int
    tile: str
    options: Mapping[str, Any]
    state: Mapping[str, Tensor]
    _plugin: Plugin = field(repr=False)
    _share: Share | None = field(repr=False)
    _amax: Tensor | None = field(default=None, repr=False)
    _random: Random | None = field(default=None, repr=False)
    _notes: list[tuple[str, Tensor]] = field(default_factory=list, repr=False)

    @classmethod
    def begin(
        cls, plugin: Plugin, spec: QuantSpec, site: CallSite, device: torch.device
    ) -> QuantizerContext:
        """Return the context of a call, without amax and random numbers."""
        state = (site.states or PluginStates()).state_of(plugin, site.key, device)
        return cls(*site.key, site.step, spec.tile, dict(spec.options), state, plugin, site.share)

    def describe(self) -> str:
        """Return the operand in words."""
        return f"{self.operand} of {self.site}, layer {self.layer}" if self.site else "a tensor"

    def note(self, name: str, value: Tensor | float) -> None:
        """Note a number, or as many as a state may have, for the function with `@end_step`.

        It gets the largest value of the step, element by element, over micro-batches and ranks.
        Raise QuantizerError if the quantizer declares no state.
        """
        if not self.state:
            raise QuantizerError("it calls note; valid: a quantizer with a state")
        noted = torch.as_tensor(value, dtype=torch.float32).detach().clone()
        if not 0 < noted.numel() <= MOST_VALUES:
            raise QuantizerError(f"it notes {noted.numel()} values; valid: 1 to {MOST_VALUES}")
        self._notes.append((name, noted))

    def of_rows(self, rows: slice) -> QuantizerContext:
        """Return the context of some rows of x."""
        if self._random is None:
            return self
        part = self._random._replace(elements=self._random.elements[rows])
        return replace(self, _random=part)

    @property
    def amax(self) -> Tensor:
        """The amax of the operand over all tensor-parallel ranks, float32 [].

        Raise QuantizerError if the quantizer does not declare `needs_amax`.
        """
        if self._amax is None:
            raise self._absent("reads amax", "needs_amax", self._plugin.needs_tensor_amax)
        return self._amax

    def largest(self, tensor: Tensor) -> Tensor:
        """Return the amax of a tensor over tensor-parallel ranks, float32 [].

        It is a collective if ranks hold shards of the operand, so every rank must call it equally
        often. Raise QuantizerError if the quantizer declares `independent_rows`.
        """
        if self._plugin.independent_rows:
            raise QuantizerError("it calls largest; valid: a quantizer without independent_rows")
        shared = self._share(tensor) if self._share else None
        return largest(tensor) if shared is None else shared

    def rand(self) -> Tensor:
        """Return a random number for each element of x, float32 [rows, K] in [0, 1).

        A number depends on the seed, the step, the layer, the operand and the position in it, so
        that a recomputed pass draws it again. Raise QuantizerError if the quantizer does not
        declare `stochastic`.
        """
        return self._declared_random("rand").elements

    def shared_rand(self, count: int) -> Tensor:
        """Return random numbers, float32 [count] in [0, 1), the same for both operands of a GEMM.

        They are also the same for all tensor-parallel ranks. Raise what `rand` raises.
        """
        random = self._declared_random("shared_rand")
        return uniform(torch.Size([count]), random.shared_seed, random.elements.device)

    def next_seed(self) -> int:
        """Return a seed for `fake_quantize`, another one in each call; raise what `rand` raises."""
        return next(self._declared_random("next_seed").seeds)

    def _declared_random(self, name: str) -> Random:
        if self._random is None:
            raise self._absent(f"calls {name}", "stochastic", self._plugin.stochastic)
        return self._random

    def _absent(self, action: str, argument: str, is_declared: bool) -> QuantizerError:
        """Return the error of a call without what the function reads."""
        valid = "x, options and state, as an estimator" if is_declared else f"{argument}=True"
        return QuantizerError(f"it {action}; valid: {valid}")


def uniform(shape: torch.Size, seed: int, device: torch.device) -> Tensor:
    """Return random numbers in [0, 1) by position, float32."""
    return draws(shape, seed, device).float() * 2.0**-RANDOM_BITS
