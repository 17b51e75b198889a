"""Where everything lies: the one place that knows the folder names of a checkout."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Project:
    """A checkout of this repository, by its root folder."""

    root: Path

    @classmethod
    def here(cls) -> Project:
        """The checkout that this very file belongs to (the package is installed editable)."""
        return cls(Path(__file__).resolve().parents[2])

    @property
    def tree(self) -> Path:
        """The vendored Megatron tree, shared by all runs and changed by none."""
        return self.root / "Megatron-LM"

    @property
    def upstream_pin(self) -> Path:
        """The file that pins upstream's version and wheel hashes."""
        return self.tree / "UPSTREAM.toml"

    @property
    def patches(self) -> Path:
        """The patch series."""
        return self.root / "patches"

    @property
    def runs(self) -> Path:
        """One folder a run."""
        return self.root / "runs"

    @property
    def data(self) -> Path:
        """Prepared datasets: text, tokenizer, index."""
        return self.root / "data"

    @property
    def cache(self) -> Path:
        """Downloads, and the indices of datasets: safe to delete at any time."""
        return self.root / ".cache"

    def compiled(self) -> dict[str, str]:
        """The variable that says where torch keeps what it compiles, unless the user has set it.

        torch's own default is in the temporary folder, which our programs have one each of.
        """
        name = "TORCHINDUCTOR_CACHE_DIR"
        return {name: os.environ.get(name, str(self.cache / "torchinductor"))}
