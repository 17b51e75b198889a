"""The folders and the version of the project; only this module knows where they are.

They belong to a checkout, or to the bundle in the wheel if mqo was installed from one.
"""

from __future__ import annotations

import importlib.metadata
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

from mqo import process
from mqo.errors import nearest

BUNDLE = Path(__file__).resolve().parent / "bundle"  # setup.py puts it into wheels
TREE = "Megatron-LM"
_DATA = ("XDG_DATA_HOME", ".local/share")


@dataclass(frozen=True)
class Project:
    """A checkout of this repository, by its root folder, or the bundle of an installed wheel.

    Commands write into the checkout, or into the user's XDG folders if the checkout is read-only or
    mqo is an installed wheel. `chosen_runs` is the folder that the user chose for runs.
    """

    root: Path
    chosen_runs: Path | None = None
    is_installed: bool = False

    @classmethod
    def here(cls, runs: Path | None = None) -> Project:
        """Return the project of this file: the wheel, or the checkout of an editable package."""
        installed = BUNDLE.is_dir()
        root = BUNDLE if installed else Path(__file__).resolve().parents[2]
        return cls(root, runs and runs.resolve(), installed)

    @property
    def ours(self) -> Path:
        """Return the folder of our own files of a Megatron tree."""
        return self.root / TREE

    @property
    def tree(self) -> Path:
        """Return the vendored Megatron tree, shared by all runs and changed by none."""
        return self._own(TREE, *_DATA) if self.is_installed else self.ours

    @property
    def upstream_pin(self) -> Path:
        """Return the file that pins upstream's version and wheel hashes."""
        return self.ours / "UPSTREAM.toml"

    @property
    def patches(self) -> Path:
        """Return the patch series."""
        return self.root / "patches"

    @property
    def runs(self) -> Path:
        """Return the folder that holds one folder per run."""
        return self.chosen_runs or self._writable("runs", *_DATA)

    @property
    def mlruns(self) -> Path:
        """Return MLflow's folder, for users who name no other store."""
        return self._writable("mlruns", *_DATA)

    @property
    def data(self) -> Path:
        """Return the folder of prepared datasets: text, tokenizer, index."""
        return self.root / "data"

    @property
    def own_data(self) -> Path:
        """Return the folder where datasets that `data` lacks are prepared."""
        return self._writable("data", *_DATA)

    @property
    def cache(self) -> Path:
        """Return the folder of downloads and dataset indices, safe to delete at any time."""
        return self._writable(".cache", "XDG_CACHE_HOME", ".cache")

    def _writable(self, name: str, variable: str, default: str) -> Path:
        """Return a folder of the checkout if the user may write it, else a folder of the user."""
        folder = self.root / name
        if not self.is_installed and os.access(nearest(folder), os.W_OK):
            return folder
        return self._own(name, variable, default)

    def _own(self, name: str, variable: str, default: str) -> Path:
        """Return a user folder: below the folder that `variable` names, else below the home."""
        base = os.environ.get(variable) or Path.home() / default
        return Path(base) / "mqo" / name.lstrip(".")

    def compiled(self) -> dict[str, str]:
        """Return the variable of torch's compile cache: the user's value, else our cache folder.

        torch's default is in the temporary folder, and each of our programs has its own.
        """
        name = "TORCHINDUCTOR_CACHE_DIR"
        return {name: os.environ.get(name, str(self.cache / "torchinductor"))}

    def commit(self) -> str | None:
        """Return the checkout's commit, with a + when files differ from it; None outside of git."""
        if self.is_installed:
            return None  # it would be the commit of the repository that holds the installation
        git = ["git", "-C", str(self.root)]
        try:
            head = process.run([*git, "rev-parse", "HEAD"], text=True)
            dirty = process.run([*git, "status", "--porcelain"], text=True)
        except OSError:
            return None
        if head.returncode != 0:
            return None
        return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")

    def version(self) -> str:
        """Return mqo's version, the pinned megatron-core's and the commit, in one line."""
        pin = tomllib.loads(self.upstream_pin.read_text(encoding="utf-8"))["version"]
        commit = self.commit()
        where = f", commit {commit}" if commit else ""
        return f"mqo {importlib.metadata.version('mqo')} (megatron-core {pin}{where})"
