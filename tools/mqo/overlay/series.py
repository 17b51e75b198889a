"""The patch series: series.toml as records, each entry's rule loaded when it is needed."""

from __future__ import annotations

import hashlib
import importlib.util
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Literal

from packaging.specifiers import SpecifierSet

from mqo.errors import OverlayError, UnknownNameError
from mqo.overlay.edits import FileEdits
from mqo.overlay.sweep import Sweep

SCHEMA = 1
Kind = Literal["site", "sweep", "add"]


@dataclass(frozen=True)
class Entry:
    """One patch of the series: its name, its kind, why, and which upstream releases need it."""

    name: str
    kind: Kind
    reason: str
    upstream: str
    folder: Path
    files: tuple[str, ...] = ()

    @property
    def source(self) -> Path:
        """The file that holds the entry's edits or rule (none for kind "add")."""
        return self.folder / f"{self.name}.py"

    @property
    def digest(self) -> str:
        """SHA-256 of the entry's source: tells whether a tree was patched with this very text."""
        content = b"" if self.kind == "add" else self.source.read_bytes()
        return hashlib.sha256(content).hexdigest()

    def holds_in(self, version: str) -> bool:
        """Whether upstream release `version` needs the entry."""
        return SpecifierSet(self.upstream).contains(version, prereleases=True)

    def load_edits(self) -> tuple[FileEdits, ...]:
        """The edits of a site entry."""
        return self._module().FILES

    def load_sweep(self) -> Sweep:
        """The rule of a sweep entry."""
        return self._module().SWEEP

    def _module(self) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"mqo_patch_{self.name}", self.source)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


@dataclass(frozen=True)
class Series:
    """All entries, in the order of application.

    `supported` is the range of upstream releases that the series was verified on; "" is any. It
    tells a release that does not need an entry from one that nobody has tried.
    """

    entries: tuple[Entry, ...]
    supported: str = ""

    @classmethod
    def load(cls, folder: Path) -> Series:
        """Read `folder`/series.toml."""
        table = tomllib.loads((folder / "series.toml").read_text(encoding="utf-8"))
        if table["schema"] != SCHEMA:
            raise OverlayError(
                f"{folder / 'series.toml'} has schema {table['schema']}",
                expected=f"schema {SCHEMA}, which this mqo reads",
            )
        entries = (Entry(folder=folder, **_tupled(row)) for row in table["entry"])
        return cls(tuple(entries), table.get("supported", ""))

    def __getitem__(self, name: str) -> Entry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise UnknownNameError("patch", name, [e.name for e in self.entries])

    def without(self, *names: str) -> Series:
        """The series less the named entries."""
        dropped = {self[name].name for name in names}
        return replace(self, entries=tuple(e for e in self.entries if e.name not in dropped))

    def supports(self, version: str) -> bool:
        """Whether the series was verified on upstream release `version`."""
        return SpecifierSet(self.supported).contains(version, prereleases=True)


def _tupled(row: dict[str, object]) -> dict:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
