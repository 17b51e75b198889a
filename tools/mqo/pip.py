"""Downloads through the running interpreter's pip: the one way anything enters from outside."""

from __future__ import annotations

import sys
from pathlib import Path

from mqo import process
from mqo.errors import SetupError


def download(requirement: str, folder: Path, *, python: str | None = None) -> Path:
    """Fetch the wheel of `requirement` ("name==version") into `folder`; its path.

    `python` ("3.12") asks for the wheel of another Python than the running one. Raises SetupError
    with pip's last words when there is none to be had.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder)]
    command += ["--python-version", python] if python else []
    done = process.run([*command, requirement], text=True)
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
            help="Check the network and pip's configuration (`pip config list`), then repeat",
        )
    return wheels[-1]
