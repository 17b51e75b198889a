"""Times the overlay's commands on a fresh copy of the tree, each as a user starts it.

    .venv/bin/python benchmarks/overlay.py

Prints a table: best of the repeats in seconds, and the ratio to a plain copy of the tree in the
same run (machines are noisy; read the ratios).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mqo.project import Project

REPEATS = 3
MQO = [sys.executable, "-m", "mqo"]


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as folder:
        tree, work = Path(folder) / "tree", Path(folder)
        shutil.copytree(Project.here().tree, tree, ignore=shutil.ignore_patterns("__pycache__"))
        numbers = iter(range(1000))
        steps: dict[str, Callable[[], object]] = {
            "copy of the tree": lambda: shutil.copytree(
                tree, work / f"copy{next(numbers)}", ignore=shutil.ignore_patterns(".mqo")
            ),
            "mqo --help": lambda: command("--help"),
            "mqo status": lambda: command("status", "--tree", tree),
            "mqo diff": lambda: command("diff", "--tree", tree),
            "quant_type_modifier.py --check": lambda: modifier("--check", "--tree", tree),
            "mqo restore": lambda: command("restore", "--tree", tree),
            "mqo apply, the whole series": lambda: command("apply", "--tree", tree),
            "mqo apply, nothing to do": lambda: command("apply", "--tree", tree),
            "mqo snapshot": lambda: command(
                "snapshot", work / f"shot{next(numbers)}", "--type", "qk=mxfp8", "--tree", tree
            ),
        }
        # Round by round, since restore and apply prepare each other.
        rounds = [{name: timed(step) for name, step in steps.items()} for _ in range(REPEATS)]
        best = {name: min(r[name] for r in rounds) for name in steps}
    unit = best["copy of the tree"]
    print("| step | best of 3, s | of a copy |\n|---|---|---|")
    for name, seconds in best.items():
        print(f"| {name} | {seconds:.2f} | {seconds / unit:.1f}x |")


def timed(step: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def modifier(*words: object) -> None:
    """Run the quant type modifier."""
    script = Project.here().root / "script" / "quant_type_modifier.py"
    subprocess.run([sys.executable, script, *map(str, words)], capture_output=True, check=True)


def command(*words: object) -> None:
    """Run an mqo command; its exit code 1 says that there is something to do, and is no failure."""
    done = subprocess.run([*MQO, *map(str, words)], capture_output=True, check=False)
    if done.returncode > 1:
        raise SystemExit(done.stderr.decode())


if __name__ == "__main__":
    main()
