"""Give damaged and hostile files to every command that reads files from elsewhere, and count.

    .venv/bin/python -m tests.fuzz_files --seed 1 [--only runs] [--count 50] [--folder DIR]
    .venv/bin/python -m tests.fuzz_files --seed 1 --only runs --case 17 --folder DIR

Each command runs in a fork with limits of time and memory, and so do the programs that it starts.
Counted are: files that made code run, files outside of the model that were copied, limits that were
hit, tracebacks, deaths by a signal, errors without a sentence, advice to load a file unchecked,
output left behind an error, an exit code of 0 with a wrong result where that is known, and files
that were used or refused. A case is its group, seed and number; a failed one is printed with them,
and its folder is kept below DIR. Exits with 1 if a case failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from . import forking
from .fuzz.limited import Ending, run
from .fuzz.makers import COMMANDS, COUNTS, PACKAGES, Case, Sound, make

GOOD = ("used", "refused")
# What libraries say to have a file loaded without their restriction, or its code run.
ADVICE = re.compile(r"trust_remote_code=|weights_only|add_safe_globals", re.IGNORECASE)


def try_case(
    group: str, seed: int, number: int, folder: Path, sound: Sound
) -> tuple[str, Case, Ending]:
    """Run a case in a new folder; return its outcome."""
    shutil.rmtree(folder, ignore_errors=True)
    case = make(group, seed, number, folder, sound)
    ended = run(case.words, folder)
    return judge(case, ended, sound), case, ended


def judge(case: Case, ended: Ending, sound: Sound) -> str:
    """Name the outcome of a case, the worst first."""
    if case.marker.exists():
        return "code ran"
    if has_leaked(case.out.with_name("model"), case.out):
        return "leaked"
    name = ended.name()
    if name == "refused" and ADVICE.search(ended.out + ended.err):
        return "advice"
    if name == "refused" and case.out.exists():
        return "output left"
    if name == "used" and case.must_refuse:
        return "wrong"
    if name == "used" and case.same_output and ended.out != sound.outputs[case.command]:
        return "wrong"
    return name


def has_leaked(model: Path, out: Path) -> bool:
    """Return whether a file outside of the model, to which a link there leads, was copied."""
    links = [path for path in model.iterdir() if path.is_symlink() and path.is_file()]
    outside = [path for path in links if not path.resolve().is_relative_to(model.resolve())]
    copies = [path for path in outside if (out / path.name).is_file()]
    return any((out / path.name).read_bytes() == path.read_bytes() for path in copies)


def try_group(
    group: str, seed: int, numbers: list[int], folder: Path, sound: Sound
) -> Counter[tuple[str, str]]:
    """Run cases of a group; return {(command, outcome): cases}, and keep what failed."""
    counts: Counter[tuple[str, str]] = Counter()
    for number in numbers:
        place = folder / f"{group}-{seed}-{number}"
        outcome, case, ended = try_case(group, seed, number, place, sound)
        counts[case.command, outcome] += 1
        last = (ended.err.strip().splitlines() or [""])[-1]
        text = f"{group} {number} {case.command}: {case.damage}: {outcome}, {ended.seconds:.1f} s"
        if outcome not in GOOD or len(numbers) == 1:
            print(f"{text}\n    {last[:400]}", flush=True)
        else:
            with (folder / "log.txt").open("a") as log:
                log.write(f"{text}: {last[:400]}\n")
            shutil.rmtree(place, ignore_errors=True)
    return counts


def main() -> int:
    """Run the program; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=COMMANDS, action="append", help="groups to run")
    parser.add_argument("--count", type=int, help="cases of each group; default: 200 or 100")
    parser.add_argument("--case", type=int, help="run only this number")
    parser.add_argument("--folder", type=Path, help="for what failed, and the undamaged files")
    asked = parser.parse_args()
    for module in PACKAGES:
        if importlib.util.find_spec(module) is None:
            parser.error(f"{module} is missing: its commands would refuse each file")
    folder = (asked.folder or Path(tempfile.mkdtemp(prefix="mqo-fuzz-"))).resolve()
    sound, total, begun = Sound(folder / "sound"), Counter(), time.monotonic()
    try:
        sound.make()
        for group in asked.only or COMMANDS:
            numbers = [*range(asked.count or COUNTS[group])] if asked.case is None else [asked.case]
            counts = try_group(group, asked.seed, numbers, folder, sound)
            for (command, outcome), count in sorted(counts.items()):
                print(f"{group:12} {command:16} {outcome:12} {count:4}", flush=True)
                total[outcome] += count
    finally:
        forking.stop()
    print(", ".join(f"{count} {outcome}" for outcome, count in total.most_common()))
    print(f"seed {asked.seed}, {time.monotonic() - begun:.0f} s, folders: {folder}")
    return int(any(outcome not in GOOD for outcome in total))


if __name__ == "__main__":
    sys.exit(main())
