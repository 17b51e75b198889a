"""Show upstream's timers as ranges in the trace of torch's profiler."""

from argparse import Namespace
from typing import Any

from torch.profiler import record_function

# The parts of a step; `mqo perf` reads these names. Each is nested in the one around it.
LABELED = frozenset(
    ("batch-generator", "forward-compute", "backward-compute", "all-grads-sync", "optimizer")
)


def label_timers(args: Namespace) -> None:
    """Make timers label the profiler's trace, if the run has upstream's --use-pytorch-profiler.

    `args` are upstream's. A timer runs only up to the run's --timing-log-level.
    """
    if args.profile and args.use_pytorch_profiler:
        from megatron.core.timers import Timer

        label(Timer)


def label(timer: Any) -> None:
    """Wrap `start` and `stop` of a timer's class, so that they begin and end a range."""
    running: dict[int, record_function] = {}
    start, stop = timer.start, timer.stop

    def started(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        if self.name in LABELED:
            running[id(self)] = record_function(self.name)
            running[id(self)].__enter__()

    def stopped(self: Any, *args: Any, **kwargs: Any) -> None:
        stop(self, *args, **kwargs)  # waits for the device
        if self.name in LABELED:
            running.pop(id(self)).__exit__(None, None, None)

    timer.start, timer.stop = started, stopped
