"""Real `mqo` processes on a small tree, started fast: see kill_driver."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

KINDS = ("out", "err", "steps")


@dataclass
class Ended:
    """A process that is over: its exit code, negative for a signal, what it said, and its steps."""

    code: int
    out: str
    err: str
    steps: list[str]
    first_step: float
    """When the first step was reached, by time.monotonic; 0 when none was."""


class Processes:
    """Runs `mqo` for the project that `folder` holds, in processes of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.folder.mkdir()
        driver = Path(__file__).with_name("kill_driver.py")
        pipe = subprocess.PIPE
        self.driver = subprocess.Popen([sys.executable, driver], stdin=pipe, stdout=pipe, text=True)
        self.count = 0

    def close(self):
        self.driver.stdin.close()
        self.driver.wait()

    def start(self, project, *words, **options):
        """Start `mqo WORDS`; what `wait` takes."""
        self.count += 1
        prefix = self.folder / str(self.count)
        for kind in KINDS:
            prefix.with_suffix(f".{kind}").touch()
        job = {"project": str(project), "prefix": str(prefix), "start": list(map(str, words))}
        return self._ask({**job, **options}), prefix

    def wait(self, started):
        """Wait until a process has ended."""
        number, prefix = started
        code = self._ask({"wait": number})
        out, err, steps = (prefix.with_suffix(f".{kind}").read_text() for kind in KINDS)
        reached = [line.split() for line in steps.splitlines()]
        first = float(reached[0][1]) if reached else 0.0
        return Ended(code, out, err, [name for name, _ in reached], first)

    def run(self, project, *words, **options):
        return self.wait(self.start(project, *words, **options))

    def _ask(self, job):
        self.driver.stdin.write(json.dumps(job) + "\n")
        self.driver.stdin.flush()
        return int(self.driver.stdout.readline())
