"""The state of custom quantizers: a few numbers for each operand, which change between steps.

Within a step the state is constant, so that a recomputed forward pass, and each micro-batch, rounds
with the same one. A quantizer notes numbers instead, and a function of the user computes the next
state from them once per step, with the same result on every rank.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from mqo.quant import weights
from mqo.quant.collectives import all_ranks
from mqo.quant.plugins import PLUGINS, Options, Plugin

Operand = tuple[str, str, str]  # site, layer and operand
Key = tuple[str, str, str, str]  # a quantizer and an operand
Values = dict[str, Tensor]
Notes = dict[Key, dict[str, list[float]]]


class PluginStates:
    """The states of a model's quantizers, and what these noted in the current step.

    `is_fixed` is set by an evaluation, in which no step ends: it ignores notes.
    """

    def __init__(self) -> None:
        self.is_fixed = False
        self._ignored = False  # notes
        self._states: dict[Key, Values] = {}
        self._notes: dict[Key, Values] = {}

    def state_of(self, plugin: Plugin, operand: Operand, device: torch.device) -> Values:
        """Return the state of an operand, float32; the declared one before its first change."""
        state = self._states.get((plugin.name, *operand)) or initial(plugin)
        return {name: value.to(device, copy=True) for name, value in state.items()}

    def note(self, plugin: Plugin, operand: Operand, notes: Iterable[tuple[str, Tensor]]) -> None:
        """Keep the largest of the values that were noted for an operand, element by element."""
        if self.is_fixed:
            self._ignored = True
            return
        kept = self._notes.setdefault((plugin.name, *operand), {})
        for name, value in notes:
            _keep_largest(kept, name, value)

    def resume(self) -> None:
        """Keep notes again, after an evaluation."""
        if self._ignored:
            weights.clear()  # the evaluation did not note those that it rounded
        self.is_fixed = self._ignored = False

    def begin_step(self) -> None:
        """Drop notes that a validation may have left."""
        if self._notes:
            weights.clear()  # the step notes its weights again
        self._notes.clear()

    def end_step(self, step: int, options: Mapping[str, Options]) -> None:
        """Compute the next states from the notes of all ranks, after the step with this number.

        `options` are those of the quantizers, by their names. It is a collective of all ranks. They
        all get all states, those of other pipeline stages and experts too, so that each can save
        and load them.

        Raises:
            ValueError: a function of a quantizer returned another state than the declared one.
        """
        if self.is_fixed:
            return
        here = {
            key: {name: value.tolist() for name, value in notes.items()}
            for key, notes in self._notes.items()
        }
        self._notes.clear()
        weights.clear()  # they were rounded with the old states
        for key, notes in sorted(_largest(all_ranks(here)).items()):
            plugin, operand = PLUGINS[key[0]], key[1:]
            if plugin.update is None:  # it was replaced by one without a state
                continue
            state = self.state_of(plugin, operand, torch.device("cpu"))
            self._states[key] = _next(plugin, operand, state, notes, step, options[plugin.name])

    def state_dict(self) -> Values:
        """Return {'QUANTIZER/SITE/LAYER/OPERAND/NAME': value, float32} of all changed states."""
        return {
            "/".join((*key, name)): value
            for key, state in self._states.items()
            for name, value in state.items()
        }

    def load_state_dict(self, values: Mapping[str, Tensor]) -> None:
        """Replace all states by those of `state_dict`; those of unknown quantizers are left out.

        Raises:
            ValueError: a value is not one that its quantizer declares.
        """
        states: dict[Key, Values] = {}
        for text, value in values.items():
            if text.count("/") < 4:
                raise ValueError(f"{text!r} is not the name of a state")
            name, site, *layer, operand, field = text.split("/")
            if name in PLUGINS:
                key = (name, site, "/".join(layer), operand)
                states.setdefault(key, {})[field] = value.to("cpu", torch.float32)
        for key, state in states.items():
            _check(PLUGINS[key[0]], state, f"the saved state of {' '.join(key)}")
        self._states = states
        self._notes.clear()  # of a step that was abandoned
        weights.clear()


def initial(plugin: Plugin) -> Values:
    """Return the state that a quantizer declares."""
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in plugin.state.items()}


def _largest(ranks: Iterable[Notes]) -> dict[Key, Values]:
    """Return the largest notes of all ranks."""
    notes: dict[Key, Values] = {}
    for rank in ranks:
        for key, noted in rank.items():
            kept = notes.setdefault(key, {})
            for name, numbers in noted.items():
                _keep_largest(kept, name, torch.tensor(numbers, dtype=torch.float32))
    return notes


def _keep_largest(kept: Values, name: str, value: Tensor) -> None:
    """Keep the largest of the values with a name, element by element."""
    shapes = [list(noted.shape) for noted in (kept.get(name, value), value)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"{name} was noted with the shapes {shapes}; valid: the same shape")
    kept[name] = torch.maximum(kept[name], value) if name in kept else value


def _next(
    plugin: Plugin,
    operand: Operand,
    state: Values,
    notes: Values,
    step: int,
    options: Options,
) -> Values:
    assert plugin.update is not None  # `end_step` checks it
    try:
        with torch.no_grad():
            result = plugin.update(state, notes, step, options)
    except Exception as error:
        raise ValueError(
            f"the function with @end_step('{plugin.name}') failed on {' '.join(operand)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    _check(plugin, result, f"the result of the function with @end_step('{plugin.name}')")
    return {name: value.detach().clone() for name, value in result.items()}


def _check(plugin: Plugin, state: object, subject: str) -> None:
    """Raise ValueError unless a state has the names, the shapes and the dtype of the declared."""
    shapes = _shapes(initial(plugin))
    if not isinstance(state, Mapping) or _shapes(state) != shapes:
        raise ValueError(f"{subject} is not valid; valid: float32 tensors of the shapes {shapes}")


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of the float32 tensors in a state, and None for other values."""
    return {
        name: tuple(value.shape)
        if isinstance(value, Tensor) and value.dtype == torch.float32
        else None
        for name, value in state.items()
    }
