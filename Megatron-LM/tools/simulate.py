"""One rank's training step, simulated: memory, products and exchanges, without data or a GPU.

    python Megatron-LM/tools/simulate.py facts.json JOB

JOB is JSON that says which rank of how many, Megatron's flags, and how many micro-batches each step
has (megatron/simulation/program.py). The run's quant options come, as in a run, from the file that
MQO_QUANT_CONFIG names. Belongs to the tree that it lies in; `mqo simulate` extrapolates and shows.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(target: Path, job: str) -> None:
    """Run the job, and write what it found."""
    sys.path.insert(0, str(ROOT))
    import preflight  # noqa: F401  (checks where megatron comes from)
    from megatron.simulation.program import Job, run

    ran = run(Job(**json.loads(job)))
    from megatron.simulation.facts import facts

    target.write_text(json.dumps(facts(ran)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
