"""What the quantizers of a model share: options, step, micro-batches and records."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from mqo.quant import weights
from mqo.quant.config import current
from mqo.quant.formats import ATTENTION, LINEAR, SITES
from mqo.quant.labels import LABEL
from mqo.quant.measurement import Measurement
from mqo.quant.micro_batches import MicroBatches
from mqo.quant.plugin_states import PluginStates
from mqo.quant.plugins import PLUGINS
from mqo.quant.progress import PROGRESS, Progress
from mqo.quant.quant_config import QuantConfig
from mqo.quant.record import RECORDER, QuantRecord, Recorder
from mqo.quant.schedule import type_at


class Quantization:
    """The options of a model's quantizers, its step and micro-batches, and what they recorded."""

    def __init__(self, options: QuantConfig, progress: Progress, recorder: Recorder) -> None:
        self._options = options
        self.progress, self.recorder = progress, recorder
        self.micro_batches = MicroBatches(progress)
        self.states = PluginStates()

    @property
    def options(self) -> QuantConfig:
        """The options."""
        return self._options

    def scheduled(self, site: str, quant_type: str) -> str:
        """Return the type of `site` at this step; `quant_type` is the one in its source.

        Raise ValueError for a share if the number of steps is unknown.
        """
        schedule = self.options.schedule.get(site)
        if schedule is None:
            return quant_type
        return type_at(schedule, self.progress.step, self.progress.total)

    def end_states(self, step: int) -> bool:
        """Compute the next states of custom quantizers; return whether any has a state.

        It is a collective of all ranks. Raise what `PluginStates.end_step` raises.
        """
        own = {name for name in self.options.own_types() if PLUGINS[name].state}
        if own:
            options = {name: dict(self.options.spec(name).options) for name in own}
            self.states.end_step(step, options)
        return bool(own)

    def begin_step(self, iteration: int) -> None:
        """Start an iteration, counted from 1; options select those to measure or keep."""
        options = self.options
        self.recorder.begin_step(iteration, options.every, options.dump, options.gradient_noise)

    @contextmanager
    def extra_pass(self) -> Iterator[None]:
        """Neither record nor count quantization in this block, which is not part of a step.

        Stochastic rounding draws the same numbers in this block and in the forward passes after it.
        """
        with self.recorder.paused(), self.micro_batches.uncounted():
            yield


class _OfProcess(Quantization):
    """That of the model that Megatron trains in this process."""

    @property
    def options(self) -> QuantConfig:
        """The options from the file that MQO_QUANT_CONFIG names; raise what `current` raises."""
        return current()


PROCESS = _OfProcess(QuantConfig(), PROGRESS, RECORDER)


class ModelQuantization(Quantization):
    """The options, the step and the records of a model that `quantize_model` changed.

    The step selects the types of a schedule, and the random numbers of stochastic rounding. It is
    the number of steps of optimizers in this process since then, until `set_step` sets it.

    Args:
        options: the types of the sites, and how they are quantized.
        layers: the names of the quantized linear layers.
        attention: the names of modules that may call quantized attention.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 4))
        >>> quantization = quantize_model(model, "mxfp8")
        >>> with quantization.measuring() as measurements:
        ...     loss = model(torch.ones(8, 32)).sum()
        >>> [(m.operand, m.quant_type) for m in measurements]
        [('weight', 'mxfp8'), ('x', 'mxfp8')]
    """

    def __init__(
        self, options: QuantConfig, layers: Iterable[str] = (), attention: Iterable[str] = ()
    ) -> None:
        super().__init__(options, Progress(), Recorder())
        self.layers, self._attention = tuple(layers), tuple(sorted(attention))
        self._epoch: int | None = weights.epoch()
        self._ended = 0  # the last step after which the states changed

    @property
    def step(self) -> int:
        """The number of completed steps."""
        self._count_step()
        return self.progress.step

    def _count_step(self) -> None:
        if self._epoch is not None and self._epoch != (epoch := weights.epoch()):
            self._epoch = epoch
            self.progress.set_step(self.progress.step + 1)

    def set_step(self, step: int, total: int | None = None) -> None:
        """Set the number of completed steps, for example of a resumed training, and their total.

        From now on, call it before each step: the steps of optimizers are no longer counted.
        """
        self._epoch = None
        self.progress.set_step(step, total)

    def begin_pass(self, layer: Module) -> None:
        """Start a forward pass of a layer, the first one of a step or a further micro-batch.

        Passes of an evaluation, in eval mode and without gradients, all draw the same numbers and
        are not counted.
        """
        trains = layer.training or torch.is_grad_enabled()
        if trains or not torch.distributed.is_initialized():  # some ranks may not evaluate
            self._end_step()
        else:
            self._count_step()
        if trains:
            self.states.resume()
        else:
            self.states.is_fixed = True
        if not self.options.is_random:
            return
        if trains:
            self.micro_batches.begin(getattr(layer, LABEL))
        else:
            self.micro_batches.begin_uncounted()

    def _end_step(self) -> None:
        """Compute the next states if an optimizer has made a step; a collective of all ranks."""
        self._count_step()
        if self.progress.step != self._ended:
            self._ended, self.states.is_fixed = self.progress.step, False
            self.end_states(self._ended)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, whose process counts other steps."""
        self._count_step()
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._epoch is not None:
            self._epoch = weights.epoch()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the states of custom quantizers, for a checkpoint after an optimizer's step.

        It is a collective: call it on all ranks, and after `set_step` if you call that.
        """
        self._end_step()
        return self.states.state_dict()

    def load_state_dict(self, values: Mapping[str, Tensor]) -> None:
        """Replace the states by those of `state_dict`; ValueError for those of other quantizers."""
        self.states.load_state_dict(values)

    def types_of(self, layer: str) -> dict[str, str]:
        """Return {site: type} of a linear layer at this step."""
        types = {site: self.scheduled(site, kind) for site, kind in self.options.asked.items()}
        return {
            site: self.options.layer_type(site, layer, kind)
            for site, kind in types.items()
            if SITES[site].layer == LINEAR
        }

    def records(self) -> list[QuantRecord]:
        """Return how often each operand was quantized, and the noise of measured calls."""
        return self.recorder.entries()

    @contextmanager
    def measuring(self) -> Iterator[list[Measurement]]:
        """Measure the operands that are quantized in this block: the list has them after it."""
        measurements: list[Measurement] = []
        self.recorder.begin_step(1, every=1, dump=())
        try:
            yield measurements
        finally:
            measurements += self.recorder.end_step()

    def idle_layers(self) -> list[str]:
        """Return the layers whose GEMMs never ran: another function multiplies them."""
        ran = {kind: set[str]() for kind in (LINEAR, ATTENTION)}
        for record in self.records():
            ran[SITES[record.site].layer].add(record.layer)
        idle = [name for name in self.layers if name not in ran[LINEAR]]
        for name in self._attention:  # it may contain the one that runs
            if not any(f"{layer}.".startswith(f"{name}.") for layer in ran[ATTENTION]):
                idle.append(name)
        return idle
