"""Run programs one after the other, and collect their output in one document.

gpu_all.py and cpu_all.py list the programs. If one fails, its section has the end of its output,
and the others still run.
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
LINES = 40  # last lines of a failed program's output


@dataclass(frozen=True)
class Benchmark:
    """A program with its arguments, those of its rehearsal, and the purpose of its figures.

    With `interpreted`, its rehearsal runs kernels in Triton's interpreter.
    """

    title: str
    command: str
    small_command: str
    purpose: str
    interpreted: bool = False
    limit_s: int = 180


def run_all(
    benchmarks: tuple[Benchmark, ...], rehearsal: bool, target: Path, introduction: str
) -> None:
    """Run all programs, rewriting `target` after each; exit with 1 if any failed."""
    text, failed = [introduction], []
    for benchmark in benchmarks:
        print(f"{benchmark.title} ...", file=sys.stderr, flush=True)
        section, code = run(benchmark, rehearsal)
        text.append(section)
        failed += [benchmark.title] * (code != 0)
        target.write_text("\n".join(text), encoding="utf-8")
    print(target)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def options(name: str, about: str | None) -> tuple[bool, Path]:
    """Parse the command line: return whether this is a rehearsal, and the file to write."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="use small sizes, on a CPU")
    parser.add_argument("--out", type=Path, help=f"file to write (default: results/{name}-DATE.md)")
    given = parser.parse_args()
    today = datetime.date.today().isoformat()
    return given.rehearse, given.out or ROOT / f"benchmarks/results/{name}-{today}.md"


def introduction(title: str, command: str, machine: str, rehearsal: bool) -> str:
    """Return the heading, with machine, commit and versions."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    kind = " **This is a rehearsal: its figures mean nothing.**" if rehearsal else ""
    return (
        f"# {title}, {datetime.date.today().isoformat()}\n\n`{command}` on {machine}, commit "
        f"{commit}, Python {platform.python_version()}, torch {torch.__version__}.{kind}\n"
    )


def run(benchmark: Benchmark, rehearsal: bool) -> tuple[str, int]:
    """Run a program; return its section, and its exit code: 124 if it exceeded its time limit."""
    words = benchmark.small_command if rehearsal else benchmark.command
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search_path())}
    if rehearsal and benchmark.interpreted:
        environment["TRITON_INTERPRET"] = "1"
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *shlex.split(words)],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=benchmark.limit_s,
        )
        code, out, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as late:
        code, out, errors = 124, str(late.stdout or ""), f"longer than {benchmark.limit_s} s"
    took = f"{time.monotonic() - start:.0f} s"
    body = out.strip() if "|" in out or code == 0 else ""
    if code:
        last = "\n".join((out + errors).splitlines()[-LINES:])
        body += f"\n\nFAILED, exit {code}:\n\n```\n{last}\n```"
    command = f"`{words}`, {took}"
    return f"## {benchmark.title}\n\n{command}\n\n{body}\n\n{benchmark.purpose}\n", code


def search_path() -> list[str]:
    """Return folders to import from; an installed Triton precedes that of tests/get_packages.py."""
    return [str(ROOT / "Megatron-LM"), str(ROOT / ".cache/triton")]
