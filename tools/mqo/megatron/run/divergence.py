"""Ends a run whose loss or gradients are not finite, with what is known of it.

Upstream's rerun state machine finds the value, runs the step again, and has all ranks agree. What
it does then serves a cluster that looks for faulty GPUs: it saves a checkpoint and exits with a
code of its own. Here all ranks end together instead, and the error says what a user can do.
"""

import math
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqo.megatron.run.checkpoints import newest_saved
from mqo.megatron.run.files import run_folder
from mqo.megatron.run.ranks import all_ranks, rank
from mqo.megatron.run.untrusted import UntrustedFileError, parse_json, read_lines
from mqo.quant.config import current
from mqo.quant.progress import step

LOSSES, GRADIENT_NORM = ("lm loss", "kd loss"), "grad-norm"
_LISTED = 3  # finite steps that an error lists
_TAIL = 1 << 20  # bytes at the end of metrics.jsonl that hold them

# The folder in which this run saves; None if it does not save.
_save: Path | None = None


class DivergenceError(RuntimeError):
    """A loss, an activation or a gradient is NaN or infinite."""


@dataclass(frozen=True)
class Seen:
    """What one rank's check rejected: `what` is "loss" or "gradient norm"."""

    rank: int
    what: str
    value: float


def begin_step(args: Namespace) -> None:
    """Note where the run saves, for an error to name its newest checkpoint."""
    global _save
    _save = Path(args.save) if getattr(args, "save", None) else None


def check_finite_loss(loss: float) -> None:
    """Raise DivergenceError if this rank's `loss` is not finite, without running the step again.

    For validation, where upstream's rerun state machine is off and ranks do not agree.
    """
    if not math.isfinite(loss):
        raise DivergenceError(
            describe(f"{_what([Seen(rank(), 'loss', loss)])} after step {step()}")
        )


def end_if_diverged(machine: Any) -> tuple[bool, bool, int]:
    """Return what upstream's rerun state machine says of a step, unless that is to end the run.

    Called on every rank, after a step's backward passes and before its update; `machine` is the
    RerunStateMachine. A collective where the run ends.

    Raises:
        DivergenceError: a rank's loss or gradient norm was NaN or infinite.
    """
    reproduced, ends, code = machine.should_checkpoint_and_exit()
    if not ends:
        return reproduced, ends, code
    seen = [one for one in all_ranks(_seen_here(machine)) if one is not None]
    again = "the same outcome" if reproduced else "another outcome: suspect the hardware"
    when = f"in step {step() + 1}, which was run again with {again}"
    raise DivergenceError(describe(f"{_what(seen)} {when}"))


def describe(what: str, *, layer_is_known: bool = False) -> str:
    """Return an error's text: `what` was found, the last finite steps, and what helps."""
    parts = [f"{what}.", _last_steps(), _where_to_start(layer_is_known), _what_to_try()]
    return " ".join(parts)


def _seen_here(machine: Any) -> Seen | None:
    call = machine.failed_validation_call
    if call is None:
        return None
    what = "gradient norm" if "grad norm" in call.caller.message else "loss"
    return Seen(rank(), what, float(machine.initial_result))


def _what(seen: list[Seen]) -> str:
    """Return a clause of the first value, and how many further ranks have one."""
    if not seen:
        return "A value was rejected"
    first, more = seen[0], len(seen) - 1
    kind = "NaN" if math.isnan(first.value) else "Inf" if math.isinf(first.value) else first.value
    others = f" and {more} more" if more else ""
    return f"{kind} in the {first.what} of rank {first.rank}{others}"


def _last_steps() -> str:
    folder = run_folder()
    rows = finite_steps(folder.metrics) if folder is not None else []
    if not rows:
        return "No finite step was recorded before."
    listed = "; ".join(
        f"step {at}: loss {loss:.4f}, gradient norm {norm:.4g}" for at, loss, norm in rows
    )
    return f"The last finite steps on record are {listed}."


def finite_steps(metrics: Path) -> list[tuple[int, float, float]]:
    """Return (step, loss, gradient norm) of the last finite steps in a metrics.jsonl, in order.

    Empty without the file, which only the last of several nodes has.
    """
    found: dict[int, dict[str, float]] = {}
    for row in _last_rows(metrics):
        name = "loss" if row.get("name") in LOSSES else row.get("name")
        if name in ("loss", GRADIENT_NORM) and math.isfinite(value := float(row["value"])):
            found.setdefault(row["iteration"], {})[name] = value
    steps = [(at, row["loss"], row[GRADIENT_NORM]) for at, row in found.items() if len(row) == 2]
    return sorted(steps)[-_LISTED:]


def _last_rows(metrics: Path) -> list[dict[str, Any]]:
    try:
        start = max(0, metrics.stat().st_size - _TAIL)
        lines = list(read_lines(metrics, start))[1 if start else 0 :]
    except (OSError, UntrustedFileError):
        return []
    # The last may be torn.
    return [parse_json(metrics, line) for line in lines if line.endswith(b"\n")]


def _where_to_start(layer_is_known: bool) -> str:
    saved = newest_saved(_save) if _save is not None else None
    place = "No checkpoint was saved."
    if saved is not None:
        place = f"The newest checkpoint is that of step {saved} in {_save}."
    return place if layer_is_known else f"{place} A run with --check-nan names the first layer."


def _what_to_try() -> str:
    tries = ["a lower --lr", "a longer warm-up (--lr-warmup-fraction)"]
    if any(wanted != "none" for wanted in current().asked.values()):
        tries += ["--exclude for the layer", "another quantization type"]
    return f"Try {', '.join(tries[:-1])} or {tries[-1]}."
