"""Download wheels through the running interpreter's pip."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mqo import process
from mqo.errors import SetupError


def download(
    requirement: str, folder: Path, *, python: str | None = None, options: Sequence[str] = ()
) -> Path:
    """Download the wheel of `requirement` ("name==version") into `folder` and return its path.

    `python` ("3.12") selects the wheel of another Python than the running one; `options` go to pip.
    Raises SetupError with the end of pip's output if it finds none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder)]
    command += ["--python-version", python] if python else []
    done = process.run([*command, *options, requirement], text=True)
    name, _, version = requirement.partition("==")
    stem = f"{name.replace('-', '_')}-{version}-"
    wheels = sorted(folder.glob(f"{stem}*.whl"), key=lambda p: p.stat().st_mtime)
    if python:
        tag = f"cp{python.replace('.', '')}"
        wheels = [w for w in wheels if f"-{tag}-" in w.name or "-py3-" in w.name]
    if done.returncode != 0 or not wheels:
        words = " ".join(done.stderr.strip().splitlines()[-2:]) or "no output"
        raise SetupError(
            f"pip could not download {requirement}: {words}",
            expected="a wheel for this machine",
            help="Check the network and pip's configuration (`pip config list`), then repeat; or "
            "put the wheel into a folder, and set PIP_NO_INDEX=1 and PIP_FIND_LINKS to that folder",
        )
    return wheels[-1]
