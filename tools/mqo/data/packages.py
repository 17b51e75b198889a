"""Fetch files with this machine's package clients."""

import shutil
import subprocess
from pathlib import Path

from mqo import process
from mqo.display import Say
from mqo.untrusted import sha256_of

_PATIENCE = 180  # seconds for a client


class UnavailableError(Exception):
    """A source that this machine cannot get; the text says why."""


def fetch(command: list[str], target: Path, pattern: str) -> None:
    """Run a client that downloads one file, and move that file to `target`."""
    if not shutil.which(command[0]):
        raise UnavailableError("not installed")
    target.parent.mkdir(parents=True, exist_ok=True)
    with process.temporary_folder(".fetch-", target.parent) as folder:
        try:
            done = process.run(command, cwd=folder, text=True, limit_s=_PATIENCE)
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"no answer in {_PATIENCE} s") from None
        files = sorted(folder.glob(pattern))
        if done.returncode or not files:
            words = (done.stderr.strip() or "no file").splitlines()[-1]
            raise UnavailableError(f"exit code {done.returncode}, {words}")
        files[0].replace(target)


def check(file: Path, name: str, sha256: str) -> None:
    """Remove a file and raise UnavailableError if its SHA-256 is not the pinned one."""
    digest = sha256_of(file)
    if digest != sha256:
        file.unlink()
        raise UnavailableError(f"its {name} has SHA-256 {digest}")


def deb(cache: Path, report: Say, name: str, version: str = "", sha256: str = "") -> Path:
    """Return a Debian package from `cache`, else with apt-get: apt's version, or a pinned one."""
    target = cache / "datasets" / f"{name}{'_' if sha256 else ''}{sha256[:16]}.deb"
    if not target.is_file():
        report(f"Downloading {name} with apt-get")
        package = f"{name}={version}" if version else name
        command = ["apt-get", "download", "-o", "Acquire::Retries=0", package]
        fetch(command, target, f"{name}_*.deb")
    if sha256:
        check(target, name, sha256)
    return target


def unpack(package: Path, folder: Path) -> Path:
    """Unpack a Debian package into `folder`; return its usr/share."""
    if not shutil.which("dpkg-deb"):
        raise UnavailableError("dpkg-deb is not installed")
    if process.run(["dpkg-deb", "-x", str(package), str(folder)]).returncode:
        package.unlink()
        raise UnavailableError(f"its {package.name} cannot be unpacked")
    return folder / "usr" / "share"
