"""Time a run of eight small steps: from the command to the first step, and to the end.

    .venv/bin/python benchmarks/start.py [--rounds 5] [CHECKOUT ...]

Runs llama32-1b in mode FA_linear_mxfp8 with the training configuration `tiny`, and prints the
median seconds over the rounds. CHECKOUTs are other versions of this project, set up with Megatron,
patches and data; they take turns with this one. Each runs once before, to fill its caches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from mqo.project import Project

RUN = ["--model", "llama32-1b", "--dataset", "wikipedia", "--quantization", "FA_linear_mxfp8"]
COMMAND = [sys.executable, "script/train_config.py", *RUN, "--training-config", "tiny"]
MARKS = {"run      :": "prepared", "  step      1/": "first step", "folder   :": "end"}


def main() -> None:
    """Run all checkouts in turns, and print the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("checkouts", type=Path, nargs="*", metavar="CHECKOUT")
    given = parser.parse_args()
    checkouts = [Project.here().root, *(path.resolve() for path in given.checkouts)]
    for checkout in checkouts:
        seconds(checkout)
    rounds = [[seconds(checkout) for checkout in checkouts] for _ in range(given.rounds)]
    print(f"| checkout | {', s | '.join(MARKS.values())}, s |\n|---|---|---|---|")
    for checkout, runs in zip(checkouts, zip(*rounds, strict=True), strict=True):
        medians = [statistics.median(times[mark] for times in runs) for mark in MARKS.values()]
        print(f"| {version(checkout)} | {' | '.join(f'{median:.1f}' for median in medians)} |")


def seconds(checkout: Path) -> dict[str, float]:
    """Run the command in a checkout; return the seconds from its start to each mark."""
    started, times = time.monotonic(), {}
    environment = os.environ | {"PYTHONPATH": str(checkout / "tools")}
    with subprocess.Popen(
        COMMAND, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            for mark, name in MARKS.items():
                if line.startswith(mark):
                    times[name] = time.monotonic() - started
    if set(times) != set(MARKS.values()):
        sys.exit(f"A run in {checkout} failed. `{' '.join(COMMAND)}` there shows why.")
    return times


def version(checkout: Path) -> str:
    """Return the commit of a checkout."""
    words = ["git", "-C", str(checkout), "log", "-1", "--format=%h"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
