"""Simulate a training step of one rank: memory, products and exchanges, without data or a GPU.

As in a run, the quant options come from the file that MQO_QUANT_CONFIG names. It simulates the tree
that contains it; `mqo simulate` extrapolates and prints.
"""

import io
import sys
from contextlib import redirect_stderr
from typing import Any

import preflight  # noqa: F401  (checks where megatron comes from)
from mqo.megatron.run.errors import InferenceError
from mqo.megatron.simulation.program import RankJob, run


def simulate(job: RankJob) -> dict[str, Any]:
    """Run the job of a rank, and return its facts; raise InferenceError for any failure."""
    output = io.StringIO()
    try:
        with redirect_stderr(output):
            ran = run(job)
    except (Exception, SystemExit) as error:
        if isinstance(error, InferenceError):
            raise
        raise explained(error, output.getvalue()) from error
    finally:
        sys.stderr.write(output.getvalue())
    from mqo.megatron.simulation.facts import facts

    return facts(ran)


def explained(error: BaseException, output: str) -> InferenceError:
    """Return an error that gives the reason of another: its text, or the last line of output."""
    lines = output.strip().splitlines()
    text = str(error).strip()
    if isinstance(error, SystemExit):
        text = lines[-1] if lines else f"exit code {error.code}"
    reason = f"Megatron's program ended as it would in a run: {type(error).__name__}: {text}"
    return InferenceError(reason, "flags of a run with local layers")
