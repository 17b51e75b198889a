"""Installs packages that only tests, and users who ask, have. Without a network tests are skipped.

Into .venv: the extras in EXTRAS. Into .cache, for tests that run their Python on a CPU: Triton, in
whose interpreter the GPU kernels run, where this Python has none; and some releases of Transformer
Engine, whose wheels are Python alone. Those not into .venv: torch and Megatron take both for a
GPU's, and a training on a CPU must not change because tests ran.
"""

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
TRITON = ROOT / ".cache/triton"
ENGINES = ROOT / ".cache/transformer_engine"
PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]

EXTRAS = ("corpus", "docs", "tasks", "trackers")

# The newest release first; the wheels are the same for every machine.
ENGINE_WHEELS = {
    "2.20.2": "7dcfad943a1a55b2612db9a0e43697fe98c70f4c42ec391ba3a0f872f6ce2094",
    "2.16.0": "ac2bb54d5217c574410079d99204b5634eb3a1137b0324f4a6dd3358982aa4f5",
    "2.10.0": "a14ccf4e887409be062c0bd8c4a341df55a77baad6aea6aabfe39c24e38252e5",
}


def main():
    """Install what is missing."""
    extras()
    triton()
    for version, sha256 in ENGINE_WHEELS.items():
        line = f"transformer_engine=={version} --hash=sha256:{sha256}"
        install(ENGINES / version, line, "--require-hashes")


def wanted_by(extra):
    """The requirements of an extra in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["optional-dependencies"][extra]


def extras():
    """Install what .venv lacks of EXTRAS, at the versions that it was made with."""
    pins = Path(sys.prefix) / "constraints.txt"  # without torch's, where the machine has one
    constraint = ["--constraint", pins if pins.exists() else ROOT / "constraints.txt"]
    for extra in EXTRAS:
        lines = [line for line in wanted_by(extra) if not is_there(Requirement(line))]
        if lines:
            print(f"[setup] the extra {extra}, for its tests", file=sys.stderr, flush=True)
            if subprocess.run([*PIP, *constraint, *lines]).returncode != 0:
                print("[setup] it is not there: these tests are skipped", file=sys.stderr)


def is_there(wanted):
    """Whether this Python has a package in a version that is asked for."""
    try:
        return importlib.metadata.version(wanted.name) in wanted.specifier
    except importlib.metadata.PackageNotFoundError:
        return False


def triton():
    """Install the version that pyproject.toml names, if this Python has none."""
    (wanted,) = wanted_by("interpreter")
    here = (platform.system(), platform.machine()) in {("Linux", "x86_64"), ("Linux", "aarch64")}
    if here and not importlib.util.find_spec("triton"):
        install(TRITON, wanted)


def install(folder, requirement, *options):
    """Install a package alone into a folder, which is whole or is not there."""
    name, _, version = requirement.partition(" ")[0].partition("==")
    if (folder / f"{name}-{version}.dist-info").exists():
        return
    print(f"[setup] {name} {version}, for tests of what runs on GPUs", file=sys.stderr, flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        listed = Path(scratch) / "requirements.txt"
        listed.write_text(requirement, encoding="utf-8")
        where = ["--no-deps", "--target", f"{scratch}/new", "--requirement", listed]
        if subprocess.run([*PIP, *where, *options]).returncode == 0:
            Path(scratch, "new").rename(folder)
        else:
            print("[setup] there is none: these tests are skipped", file=sys.stderr)


if __name__ == "__main__":
    main()
