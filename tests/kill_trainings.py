"""Kill trainings at random points, restart them, and compare them with undisturbed ones.

    .venv/bin/python tests/kill_trainings.py --kills 30 --seed 1 [--folder DIR]

A training is `tiny` with a CHECKPOINT that is saved every second step. It is killed with SIGKILL,
one to three times: at a step, during a save, between the last save and the end of the final
validation, or at a random time. About every third kill is of the launcher only, so that its
training outlives it for a while. The same command then starts it again, until it has ended. All
recorded losses, the validations and the result must be those of an undisturbed run, to the bit, and
the command of the finished training must say so. Prints a table; exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from mqo.launch.checkpoint_lock import FILE as LOCK
from mqo.launch.checkpoints import saved, tracked
from mqo.launch.finished import FILE as FINISHED
from mqo.matrix import tables
from mqo.project import Project
from mqo.runs import TRAIN_LOSS, VALID_LOSS, RunFolder

LAUNCHER = Project.here().root / "script/train_config.py"
LAST = tables.trainings()["tiny"].iterations
SAVE_EVERY, EVAL_EVERY, KEPT = 2, 3, 3
POLL_S = 0.005
MODES = {
    "mxfp8, all GEMMs, stochastic": (
        *("--quantization", "mxfp8", "--gemms", "all", "--rounding", "stochastic"),
    ),
    "linear_mxfp4": ("--quantization", "linear_mxfp4"),
    "recipe nvfp4": ("--quantization", "bf16", "--recipe", "nvfp4"),
}
Moment = Literal["step", "save", "end", "time"]


@dataclass(frozen=True)
class Kill:
    """When to kill: at `step` or at its save, after the last save, or after `seconds`."""

    moment: Moment
    step: int
    seconds: float
    launcher_only: bool

    @classmethod
    def draw(cls, rng: random.Random, start_s: float) -> Kill:
        """Return a random one; an undisturbed run takes `start_s` seconds."""
        moment: Moment = rng.choice(("step", "save", "end", "end", "time"))
        return cls(moment, rng.randint(1, LAST), rng.uniform(0, start_s), rng.random() < 1 / 3)


class Training:
    """A training: its CHECKPOINT, and one run folder for each start that got so far."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.saved, self.runs = folder / "checkpoints", folder / "runs"
        self.command = [sys.executable, LAUNCHER, self.saved, "--model", "llama32-1b"]
        self.command += ["--dataset", "wikipedia", "--training-config", "tiny", *MODES[mode]]
        self.command += ["--runs", self.runs, "--keep-last", str(KEPT)]
        self.command += ["--", "--save-interval", str(SAVE_EVERY)]
        self.command += ["--eval-interval", str(EVAL_EVERY)]

    def start(self, kill: Kill | None = None) -> tuple[int | None, str]:
        """Start it; return its exit code and output, or None if it was killed as `kill` says."""
        with tempfile.TemporaryFile("w+") as output:
            begun = time.monotonic()
            process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            killed = False
            while process.poll() is None:
                if kill and not killed and self._is_due(kill, time.monotonic() - begun):
                    end_now(process.pid, launcher_only=kill.launcher_only)
                    killed = True
                time.sleep(POLL_S)
            output.seek(0)
            return None if killed else process.returncode, output.read()

    def folders(self) -> list[RunFolder]:
        """Return the run folders in the order of the starts."""
        return [RunFolder(path) for path in sorted(self.runs.iterdir(), key=_begun)]

    def _is_due(self, kill: Kill, seconds: float) -> bool:
        match kill.moment:
            case "time":
                return seconds >= kill.seconds
            case "step":
                return self._last_step() >= kill.step
            case "save":
                return any(step > self._saved() and step >= kill.step for step in self._begun())
            case "end":
                return self._saved() == LAST and not (self.saved / FINISHED).exists()

    def _last_step(self) -> int:
        run = self.folders()[-1:] if self.runs.exists() else []
        rows = run[0].read_metrics().get(TRAIN_LOSS) if run and run[0].metrics.exists() else None
        return rows[-1][0] if rows else 0

    def _saved(self) -> int:
        with suppress(OSError, ValueError):
            return int(tracked(self.saved))
        return 0

    def _begun(self) -> Iterator[int]:
        for path in self.saved.glob("iter_*"):
            yield int(path.name.removeprefix("iter_"))


def end_now(pid: int, *, launcher_only: bool) -> None:
    """Send SIGKILL to a launcher, and to all that it started."""
    parent = psutil.Process(pid)
    below = [] if launcher_only else parent.children(recursive=True)
    for one in (parent, *below):
        with suppress(psutil.NoSuchProcess):
            one.kill()


def _begun(path: Path) -> tuple[float, str]:
    command = RunFolder(path).config
    return (command.stat().st_mtime if command.exists() else path.stat().st_mtime, path.name)


def differences(whole: Training, other: Training) -> list[str]:
    """Return what of a training that was killed is not as in the undisturbed one."""
    (run,) = whole.folders()
    found = []
    expected = run.read_metrics()
    steps = set()
    for folder in other.folders():
        rows = folder.read_metrics() if folder.metrics.exists() else {}
        steps |= {step for step, _ in rows.get(TRAIN_LOSS, [])}
        for name in (TRAIN_LOSS, VALID_LOSS):
            # The last step can have two validations: the periodic and the final one.
            missing = set(rows.get(name, [])) - set(expected[name])
            found += [f"{name} of step {step}: {value!r}" for step, value in sorted(missing)]
    if steps != {step for step, _ in expected[TRAIN_LOSS]}:
        found.append(f"steps {sorted(steps)}")
    *_, last = other.folders()
    was, now = (json.loads(folder.result.read_text()) for folder in (run, last))
    for name in ("iterations", "valid_loss", "vocab_size", "types", "schedule"):
        if was[name] != now[name]:
            found.append(f"{name} {now[name]!r}, not {was[name]!r}")
    if now["train_loss"] not in (was["train_loss"], None):
        found.append(f"train_loss {now['train_loss']!r}, not {was['train_loss']!r}")
    # A kill between the last save and the removal after it leaves an older one.
    if saved(other.saved)[-KEPT:] != saved(whole.saved):
        found.append(f"checkpoints {saved(other.saved)}")
    if (other.saved / LOCK).exists():
        found.append(f"{LOCK} is left")
    return found


def try_kills(
    folder: Path,
    mode: str,
    whole: Training,
    kills: list[Kill],
    after: Callable[[Training], None] = lambda training: None,
) -> tuple[list[Kill], list[str]]:
    """Return the kills that came in time, and what differs once the training has ended.

    `after` is called with the training after each of these kills.
    """
    training, done = Training(folder, mode), []
    for kill in kills:
        code, said = training.start(kill)
        if code is not None:  # it ended, or failed, before the kill was due
            if code:
                return done, [f"exit code {code}: {said[-1500:]}"]
            break
        done.append(kill)
        after(training)
    code, said = training.start()
    if code:
        return done, [f"exit code {code}: {said[-1500:]}"]
    count = len(training.folders())
    code, said = training.start()
    if code or "already trained" not in said or len(training.folders()) != count:
        return done, [f"the command of the finished training: exit code {code}: {said[-1500:]}"]
    return done, differences(whole, training)


def main() -> int:
    """Run the program; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="a new folder; default: a temporary one")
    args = parser.parse_args()
    rng, total, failed = random.Random(args.seed), 0, 0
    with tempfile.TemporaryDirectory(prefix="mqo-kills-") as scratch:
        folder = args.folder or Path(scratch)
        wholes, seconds = {}, {}
        for number in itertools.count():
            if total >= args.kills:
                break
            mode = list(MODES)[number % len(MODES)]
            if mode not in wholes:
                wholes[mode], begun = Training(folder / f"whole {len(wholes)}", mode), time.time()
                code, said = wholes[mode].start()
                if code:
                    print(said)
                    return 1
                seconds[mode] = time.time() - begun
            count = min(rng.randint(1, 3), args.kills - total)
            kills = [Kill.draw(rng, seconds[mode]) for _ in range(count)]
            done, found = try_kills(folder / f"killed {number}", mode, wholes[mode], kills)
            total += len(done)
            failed += bool(found)
            moments = Counter(kill.moment + " (launcher)" * kill.launcher_only for kill in done)
            listed = ", ".join(f"{count} {moment}" for moment, count in sorted(moments.items()))
            print(
                f"{number:3} {mode:30} {listed or 'none in time':40} "
                f"{'; '.join(found) or 'bit-equal'}",
                flush=True,
            )
    print(f"{total} kills in {number} trainings: {failed} differ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
