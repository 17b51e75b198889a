"""Runs a program of a Megatron tree in a process of its own, for `mqo` itself imports no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mqo.errors import MqoError, RunError


def run_program(
    program: Path,
    words: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    error: type[MqoError] = RunError,
    help: str = "",
    limit_s: float | None = None,
) -> None:
    """Run it alone: with nothing of this environment's Python path, nor of a run's variables.

    What it wrote to the file that MQO_FAILURE names, as JSON of an MqoError's parts, is raised as
    `error`; any other failure as RunError, with `help` and its last words.
    """
    with tempfile.TemporaryDirectory(prefix="mqo-program-") as folder:
        failure = Path(folder) / "failure.json"
        # A run's options are none of this one's; everything that is read is on disk.
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MQO_")}
        own = {"HF_HUB_OFFLINE": "1", "MQO_FAILURE": str(failure)}
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-W", "ignore", str(program), *words],
                env=kept | own | dict(variables or {}),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            raise RunError(f"{_name(program)} did not end within {limit_s} s") from None
        if failure.exists():
            raise error(**json.loads(failure.read_text(encoding="utf-8")))
    if done.returncode != 0:
        last = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise RunError(
            f"{_name(program)} ended with exit code {done.returncode}: {last[-1]}",
            help=help,
            detail=done.stderr[-4000:],
        )


def _name(program: Path) -> str:
    return f"{program.parent.name}/{program.name}"
