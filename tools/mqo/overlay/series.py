"""The patch series: series.toml as records, each entry's rule loaded when it is needed."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Literal

from packaging.specifiers import SpecifierSet

from mqo.errors import OverlayError, UnknownNameError
from mqo.overlay.edits import FileEdits
from mqo.overlay.sweep import Sweep
from mqo.project import Project

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
    requires: tuple[str, ...] = ()

    @property
    def source(self) -> Path:
        """The file that holds the entry's edits or rule (none for kind "add")."""
        return self.folder / f"{self.name}.py"

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
        """Run the source as it is now: no bytecode is read, which may be older, or left behind."""
        module = ModuleType(f"mqo_patch_{self.name}")
        exec(compile(self.source.read_bytes(), str(self.source), "exec"), module.__dict__)
        return module


@dataclass(frozen=True)
class Series:
    """All entries, in the order of application.

    `ours` is the tree that holds the files of "add" entries: in it they lie already, in any other
    one they are placed. Without it they are taken for placed. `supported` is the range of upstream
    releases that the series was verified on, "" for any: it tells a release that does not need an
    entry from one that nobody has tried.
    """

    entries: tuple[Entry, ...]
    supported: str = ""
    ours: Path | None = None

    @classmethod
    def load(cls, folder: Path, ours: Path | None = None) -> Series:
        """Read `folder`/series.toml."""
        table = tomllib.loads((folder / "series.toml").read_text(encoding="utf-8"))
        if table["schema"] != SCHEMA:
            raise OverlayError(
                f"{folder / 'series.toml'} has schema {table['schema']}",
                expected=f"schema {SCHEMA}, which this mqo reads",
            )
        entries = (Entry(folder=folder, **_tupled(row)) for row in table["entry"])
        return cls(tuple(entries), table.get("supported", ""), ours)

    @classmethod
    def of(cls, project: Project) -> Series:
        """The project's series, with its own tree for the files of "add" entries."""
        return cls.load(project.patches, ours=project.tree)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the entries."""
        return tuple(entry.name for entry in self.entries)

    def __getitem__(self, name: str) -> Entry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise UnknownNameError("patch", name, self.names)

    def supports(self, version: str) -> bool:
        """Whether the series was verified on upstream release `version`."""
        return SpecifierSet(self.supported).contains(version, prereleases=True)

    def only(self, names: Collection[str]) -> Series:
        """The named entries, in the series' order; names that it does not hold are ignored."""
        return replace(self, entries=tuple(e for e in self.entries if e.name in names))

    def without(self, *names: str) -> Series:
        """The series less the named entries, and less those that require one of them."""
        dropped = {self[name].name for name in names}
        dropped |= {e.name for e in self.entries if dropped & self.with_required([e.name])}
        return self.only(set(self.names) - dropped)

    def with_required(self, names: Collection[str]) -> set[str]:
        """The named entries, and all that they require."""
        wanted: set[str] = set()
        todo = list(names)
        while todo:
            entry = self[todo.pop()]
            wanted.add(entry.name)
            todo += [name for name in entry.requires if name not in wanted]
        return wanted

    def placed_files(self, entry: Entry, root: Path) -> dict[str, bytes]:
        """{path: content} of the files of an "add" entry, for a tree at `root` that lacks them."""
        if self.ours is None or self.ours.resolve() == root.resolve():
            return {}
        return added_files(entry, self.ours)


def added_files(entry: Entry, root: Path) -> dict[str, bytes]:
    """{path: content} of the files of an "add" entry that lie in the tree at `root`."""
    paths = [path for name in entry.files for path in _files_below(root / name)]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def _files_below(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = (p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return sorted(files)


def _tupled(row: dict[str, object]) -> dict:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
