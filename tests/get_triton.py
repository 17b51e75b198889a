"""Puts Triton into .cache/triton, for the tests of the GPU kernels, where this Python has none.

Not into .venv: torch and Megatron take it for a GPU's, and a training on a CPU must not change
because tests ran. Without a network those tests are skipped.
"""

import importlib.util
import platform
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache/triton"


def main():
    """Install the version that pyproject.toml names, once."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = project["optional-dependencies"]["interpreter"]
    name, version = wanted.split("==")
    here = (platform.system(), platform.machine()) in {("Linux", "x86_64"), ("Linux", "aarch64")}
    if importlib.util.find_spec(name) or not here:
        return
    if (FOLDER / f"{name}-{version}.dist-info").exists():
        return
    print(f"[setup] {wanted}, for the tests of the GPU kernels", file=sys.stderr, flush=True)
    shutil.rmtree(FOLDER, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    done = subprocess.run([*command, "--disable-pip-version-check", "--target", FOLDER, wanted])
    if done.returncode != 0:
        shutil.rmtree(FOLDER, ignore_errors=True)
        print("[setup] there is none: these tests are skipped", file=sys.stderr)


if __name__ == "__main__":
    main()
