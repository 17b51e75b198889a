"""Add the patches and our files of a Megatron tree, which commands read, to the wheel.

In a clone they are outside the package. Everything else is in pyproject.toml.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
BUNDLE = Path("mqo", "bundle")  # mqo/project.py reads it
FOLDERS = ("patches", "Megatron-LM")
# Setup puts upstream's files there. MANIFEST.in leaves out the same.
UPSTREAMS = ("Megatron-LM/megatron/core", "Megatron-LM/megatron/training", "Megatron-LM/.mqo")


def left_out(folder: str, names: list[str]) -> set[str]:
    """Return the names in a folder that are upstream's, or compiled."""
    there = Path(folder).relative_to(ROOT)
    return {
        name for name in names if name == "__pycache__" or (there / name).as_posix() in UPSTREAMS
    }


class BuildWithBundle(build_py):
    """Build the package, with the bundle in it unless the installation is editable."""

    def run(self) -> None:
        """Build."""
        super().run()
        if self.editable_mode:
            return
        for name in FOLDERS:
            target = Path(self.build_lib, BUNDLE, name)
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(ROOT / name, target, ignore=left_out)


setup(cmdclass={"build_py": BuildWithBundle})
