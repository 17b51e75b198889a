"""One rank's training step, simulated: memory, products and exchanges, without data or a GPU.

    python Megatron-LM/tools/simulate.py facts.json JOB

JOB is JSON that says which rank of how many, Megatron's flags, and how many micro-batches each step
has (mqo/megatron/simulation/program.py). The run's quant options come, as in a run, from the file
that MQO_QUANT_CONFIG names. Belongs to the tree that it lies in; `mqo simulate` extrapolates and
shows. Why it fails is written to the file that MQO_FAILURE names.
"""

import io
import json
import os
import sys
from contextlib import redirect_stderr
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(target: Path, job: str) -> None:
    """Run the job, and write what it found."""
    sys.path.insert(0, str(ROOT))
    import preflight  # noqa: F401  (checks where megatron comes from)
    from mqo.megatron.simulation.program import RankJob, run

    said = io.StringIO()
    try:
        with redirect_stderr(said):
            ran = run(RankJob(**json.loads(job)))
    except (Exception, SystemExit) as error:
        explain(error, said.getvalue())
        raise
    finally:
        sys.stderr.write(said.getvalue())
    from mqo.megatron.simulation.facts import facts

    target.write_text(json.dumps(facts(ran)), encoding="utf-8")


def explain(error: BaseException, said: str) -> None:
    """Write why the program ended: a typed error's facts, its text, or what it printed last."""
    lines = said.strip().splitlines()
    text = str(error).strip()
    if isinstance(error, SystemExit):
        text = lines[-1] if lines else f"exit code {error.code}"
    found = f"Megatron's program ended as it would in a run: {type(error).__name__}: {text}"
    table = {"found": found, "expected": "flags that a run with local layers takes"}
    table = getattr(error, "facts", table)
    if path := os.environ.get("MQO_FAILURE"):
        Path(path).write_text(json.dumps(table), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
