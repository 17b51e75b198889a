"""Simulate a training step of one rank: memory, products and exchanges, without data or a GPU.

    python Megatron-LM/tools/simulate.py facts.json JOB

JOB is JSON: the rank, the number of ranks, Megatron's flags, and the number of micro-batches of
each step (mqo/megatron/simulation/program.py). As in a run, the quant options come from the file
that MQO_QUANT_CONFIG names. It simulates the tree that contains it; `mqo simulate` extrapolates
and prints. The reason of a failure is written to the file that MQO_FAILURE names.
"""

import io
import json
import os
import sys
from contextlib import redirect_stderr
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(target: Path, job: str) -> None:
    """Run the job, and write its facts to `target`."""
    sys.path.insert(0, str(ROOT))
    import preflight  # noqa: F401  (checks where megatron comes from)
    from mqo.megatron.simulation.program import RankJob, run

    output = io.StringIO()
    try:
        with redirect_stderr(output):
            ran = run(RankJob(**json.loads(job)))
    except (Exception, SystemExit) as error:
        explain(error, output.getvalue())
        raise
    finally:
        sys.stderr.write(output.getvalue())
    from mqo.megatron.simulation.facts import facts

    target.write_text(json.dumps(facts(ran)), encoding="utf-8")


def explain(error: BaseException, output: str) -> None:
    """Write the reason of a failure: the facts of a typed error, its text, or the last output."""
    lines = output.strip().splitlines()
    text = str(error).strip()
    if isinstance(error, SystemExit):
        text = lines[-1] if lines else f"exit code {error.code}"
    reason = f"Megatron's program ended as it would in a run: {type(error).__name__}: {text}"
    table = {"found": reason, "expected": "flags of a run with local layers"}
    table = getattr(error, "facts", table)
    if path := os.environ.get("MQO_FAILURE"):
        Path(path).write_text(json.dumps(table), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
