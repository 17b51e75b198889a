"""Installs what tests need and training does not. Without a network those tests are skipped.

Extras of pyproject.toml go into .venv. Packages for GPUs go into .cache, for tests that run their
Python on a CPU: Triton, in whose interpreter the GPU kernels run, where this Python has none; and
some releases of Transformer Engine, whose wheels are Python alone. Not into .venv: torch and
Megatron take both for a GPU's, and a training on a CPU must not change because tests ran.
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
EXTRAS = ("docs",)

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


def wanted_of(extra):
    """Return what pyproject.toml asks for in an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["optional-dependencies"][extra]


def extras():
    """Install what the extras want and .venv lacks, at the versions that bootstrap.py pins."""
    for extra in EXTRAS:
        lacking = [line for line in wanted_of(extra) if not is_installed(Requirement(line))]
        if not lacking:
            continue
        say(f"the extra '{extra}', for tests")
        pins = ["--constraint", Path(sys.prefix) / "constraints.txt"]
        if subprocess.run([*PIP, *pins, *lacking]).returncode != 0:
            say("it is not to be had: its tests are skipped")


def is_installed(requirement):
    """Whether this Python has the package, in a version that is asked for, or need not have it."""
    if requirement.marker and not requirement.marker.evaluate():
        return True
    try:
        return importlib.metadata.version(requirement.name) in requirement.specifier
    except importlib.metadata.PackageNotFoundError:
        return False


def triton():
    """Install the version that pyproject.toml names, if this Python has none."""
    (wanted,) = wanted_of("interpreter")
    here = (platform.system(), platform.machine()) in {("Linux", "x86_64"), ("Linux", "aarch64")}
    if here and not importlib.util.find_spec("triton"):
        install(TRITON, wanted)


def install(folder, requirement, *options):
    """Install a package alone into a folder, which is whole or is not there."""
    name, _, version = requirement.partition(" ")[0].partition("==")
    if (folder / f"{name}-{version}.dist-info").exists():
        return
    say(f"{name} {version}, for tests of what runs on GPUs")
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        listed = Path(scratch) / "requirements.txt"
        listed.write_text(requirement, encoding="utf-8")
        where = ["--no-deps", "--target", f"{scratch}/new", "--requirement", listed]
        if subprocess.run([*PIP, *where, *options]).returncode == 0:
            Path(scratch, "new").rename(folder)
        else:
            say("there is none: these tests are skipped")


def say(text):
    print(f"[setup] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
