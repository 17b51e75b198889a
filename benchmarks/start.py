"""Seconds from the command to the first step, and to the end, of a run of eight small steps.

    .venv/bin/python benchmarks/start.py [--rounds 5] [CHECKOUT ...]

CHECKOUTs are other versions of this project, set up (vendored and patched, with data); they take
turns with this one. Each is started once before, so that what is kept between runs is there.
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
    """Run all in turns, and print the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("checkouts", type=Path, nargs="*", metavar="CHECKOUT")
    given = parser.parse_args()
    places = [Project.here().root, *(path.resolve() for path in given.checkouts)]
    for place in places:
        seconds(place)
    rounds = [[seconds(place) for place in places] for _ in range(given.rounds)]
    print(f"| checkout | {' | '.join(MARKS.values())} |\n|---|---|---|---|")
    for place, found in zip(places, zip(*rounds, strict=True), strict=True):
        medians = [statistics.median(one[mark] for one in found) for mark in MARKS.values()]
        print(f"| {version(place)} | {' | '.join(f'{median:.1f}' for median in medians)} |")


def seconds(place: Path) -> dict[str, float]:
    """Return when each mark was printed, from the start."""
    started, found = time.monotonic(), {}
    environment = os.environ | {"PYTHONPATH": str(place / "tools")}
    with subprocess.Popen(
        COMMAND, cwd=place, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            for mark, name in MARKS.items():
                if line.startswith(mark):
                    found[name] = time.monotonic() - started
    if set(found) != set(MARKS.values()):
        sys.exit(f"A run in {place} did not end well")
    return found


def version(place: Path) -> str:
    """Return the commit."""
    words = ["git", "-C", str(place), "log", "-1", "--format=%h"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
