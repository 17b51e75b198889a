"""Programs run one after the other, and their output as one document.

gpu_all.py and cpu_all.py list the programs. A part that fails is shown with the end of its output,
and the others run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from mqo.project import Project

ROOT = Project.here().root
LINES = 40  # of a failed part's output


@dataclass(frozen=True)
class Part:
    """A program with its words, those of the rehearsal, and what its figures are for.

    `interpreted` rehearsals run kernels in Triton's interpreter.
    """

    title: str
    words: str
    small: str
    purpose: str
    interpreted: bool = False
    limit_s: int = 180


def run_all(parts: tuple[Part, ...], rehearsal: bool, target: Path, introduction: str) -> None:
    """Run all parts and write `target`, anew behind each; exit with 1 if one failed."""
    text, failed = [introduction], []
    for part in parts:
        print(f"{part.title} ...", file=sys.stderr, flush=True)
        found, code = run(part, rehearsal)
        text.append(found)
        failed += [part.title] * (code != 0)
        target.write_text("\n".join(text), encoding="utf-8")
    print(target)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def options(name: str, about: str | None) -> tuple[bool, Path]:
    """Read the command line: whether it is a rehearsal, and the file to write."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="small, on a CPU")
    parser.add_argument("--out", type=Path, help=f"the file; by default results/{name}-DATE.md")
    given = parser.parse_args()
    today = datetime.date.today().isoformat()
    return given.rehearse, given.out or ROOT / f"benchmarks/results/{name}-{today}.md"


def introduction(title: str, command: str, machine: str, rehearsal: bool) -> str:
    """Return the heading: the machine, the commit and the versions."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    kind = " **A rehearsal: no figure means anything.**" if rehearsal else ""
    return (
        f"# {title}, {datetime.date.today().isoformat()}\n\n`{command}` on {machine}, commit "
        f"{commit}, Python {platform.python_version()}, torch {torch.__version__}.{kind}\n"
    )


def run(part: Part, rehearsal: bool) -> tuple[str, int]:
    """Return a part's section, and its exit code; 124 if it took too long."""
    words = part.small if rehearsal else part.words
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search_path())}
    if rehearsal and part.interpreted:
        environment["TRITON_INTERPRET"] = "1"
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *shlex.split(words)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=part.limit_s,
        )
        code, out, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, out, errors = 124, str(late.stdout or ""), f"longer than {part.limit_s} s"
    took = f"{time.monotonic() - start:.0f} s"
    body = out.strip() if "|" in out or code == 0 else ""
    if code:
        last = "\n".join((out + errors).splitlines()[-LINES:])
        body += f"\n\nFAILED, exit {code}:\n\n```\n{last}\n```"
    command = f"`{words}`, {took}"
    return f"## {part.title}\n\n{command}\n\n{body}\n\n{part.purpose}\n", code


def search_path() -> list[str]:
    """Return where modules are, the Triton of tests/get_packages.py behind an installed one."""
    return [str(ROOT / "Megatron-LM"), str(ROOT / ".cache/triton")]
