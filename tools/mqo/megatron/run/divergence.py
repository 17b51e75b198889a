"""End a run whose loss or gradients are not finite, and explain the error.

Upstream's rerun state machine finds the value, runs the step again, and makes all ranks agree. Then
it saves a checkpoint and exits with its own code, for clusters that search for faulty GPUs. Here
all ranks end together instead, and the error suggests what to try.
"""

import math
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqo.megatron.run.checkpoints import newest_saved
from mqo.megatron.run.files import run_folder
from mqo.megatron.run.ranks import rank
from mqo.megatron.run.untrusted import UntrustedFileError, parse_json, read_lines
from mqo.quant.collectives import all_ranks
from mqo.quant.config import current
from mqo.quant.progress import PROGRESS

LOSSES, GRADIENT_NORM = ("lm loss", "kd loss"), "grad-norm"
_LISTED = 3  # finite steps that an error lists
_TAIL = 1 << 20  # bytes at the end of metrics.jsonl that hold them

# The folder where this run saves; None if it does not save.
_save: Path | None = None


class DivergenceError(RuntimeError):
    """A loss, an activation or a gradient is NaN or infinite."""


@dataclass(frozen=True)
class Rejected:
    """A value that one rank rejected: `quantity` is "loss" or "gradient norm"."""

    rank: int
    quantity: str
    value: float


def begin_step(args: Namespace) -> None:
    """Record where the run saves, so that an error can name its newest checkpoint."""
    global _save
    _save = Path(args.save) if getattr(args, "save", None) else None


def check_finite_loss(loss: float) -> None:
    """Raise DivergenceError if this rank's `loss` is not finite, without running the step again.

    For validation, where upstream's rerun state machine is off and each rank decides for itself.
    """
    if not math.isfinite(loss):
        raise DivergenceError(
            error_text(f"{_clause([Rejected(rank(), 'loss', loss)])} after step {PROGRESS.step}")
        )


def end_if_diverged(machine: Any) -> tuple[bool, bool, int]:
    """Return the decision of upstream's rerun state machine, unless it ends the run.

    Called on every rank, after a step's backward passes and before its update; `machine` is the
    RerunStateMachine. A collective if the run ends.

    Raises:
        DivergenceError: a rank's loss or gradient norm was NaN or infinite.
    """
    reproduced, ends, code = machine.should_checkpoint_and_exit()
    if not ends:
        return reproduced, ends, code
    rejected = [value for value in all_ranks(_rejected_here(machine)) if value is not None]
    again = "the same result" if reproduced else "another result: suspect the hardware"
    when = f"in step {PROGRESS.step + 1}, which was run again with {again}"
    raise DivergenceError(error_text(f"{_clause(rejected)} {when}"))


def error_text(clause: str, *, layer_is_known: bool = False) -> str:
    """Return an error's text: `clause`, the last finite steps, and what to try."""
    parts = [f"{clause}.", _last_steps(), _where_to_start(layer_is_known), _what_to_try()]
    return " ".join(parts)


def _rejected_here(machine: Any) -> Rejected | None:
    call = machine.failed_validation_call
    if call is None:
        return None
    quantity = "gradient norm" if "grad norm" in call.caller.message else "loss"
    return Rejected(rank(), quantity, float(machine.initial_result))


def _clause(rejected: list[Rejected]) -> str:
    """Return a clause on the first value, and the number of further ranks with one."""
    if not rejected:
        return "A value was rejected"
    first, more = rejected[0], len(rejected) - 1
    kind = "NaN" if math.isnan(first.value) else "Inf" if math.isinf(first.value) else first.value
    others = f" and {more} more" if more else ""
    return f"{kind} in the {first.quantity} of rank {first.rank}{others}"


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

    The list is empty without the file, which only the last of several nodes has.
    """
    values: dict[int, dict[str, float]] = {}
    for row in _last_rows(metrics):
        name = "loss" if row.get("name") in LOSSES else row.get("name")
        if name in ("loss", GRADIENT_NORM) and math.isfinite(value := float(row["value"])):
            values.setdefault(row["iteration"], {})[name] = value
    steps = [(at, row["loss"], row[GRADIENT_NORM]) for at, row in values.items() if len(row) == 2]
    return sorted(steps)[-_LISTED:]


def _last_rows(metrics: Path) -> list[dict[str, Any]]:
    try:
        start = max(0, metrics.stat().st_size - _TAIL)
        lines = list(read_lines(metrics, start))[1 if start else 0 :]
    except (OSError, UntrustedFileError):
        return []
    # The last line may be incomplete.
    return [parse_json(metrics, line) for line in lines if line.endswith(b"\n")]


def _where_to_start(layer_is_known: bool) -> str:
    saved = newest_saved(_save) if _save is not None else None
    newest = "No checkpoint was saved."
    if saved is not None:
        newest = f"The newest checkpoint is of step {saved} in {_save}."
    return newest if layer_is_known else f"{newest} A run with --check-nan names the first layer."


def _what_to_try() -> str:
    tries = ["a lower --lr", "a longer warm-up (--lr-warmup-fraction)"]
    if any(wanted != "none" for wanted in current().asked.values()):
        tries += ["--exclude for the layer", "another quantization type"]
    return f"Try {', '.join(tries[:-1])} or {tries[-1]}."
