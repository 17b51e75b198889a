"""The patch series: series.toml as records, with each entry's rule loaded on demand."""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Literal

from mqo.errors import TableError, UnknownNameError
from mqo.overlay import runtime
from mqo.overlay.checkout import PACKAGES
from mqo.overlay.codemod import Codemod
from mqo.overlay.edits import Edit, FileEdits, covers
from mqo.overlay.runtime import FOLDER
from mqo.overlay.schema import build, check_specifier, check_text, read_table, refusal
from mqo.process import Stop
from mqo.project import Project

SCHEMA = 1
NAME = re.compile(r"[a-z][a-z0-9_]{0,59}")
Kind = Literal["site", "codemod", "add"]


@dataclass(frozen=True)
class Entry:
    """One patch of the series: its name, kind and reason, and the releases that need it."""

    name: str
    kind: Kind
    reason: str
    upstream: str
    folder: Path
    files: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()

    @property
    def source(self) -> Path:
        """Return the file that holds the entry's edits or rule (none for kind "add")."""
        return self.folder / f"{self.name}.py"

    def applies_to(self, version: str) -> bool:
        """Return whether upstream release `version` needs the entry."""
        return covers(self.upstream, version)

    def load_edits(self) -> tuple[FileEdits, ...]:
        """Return the edits of a site entry; TableError if its source does not define them."""
        files = getattr(self._module(), "FILES", None)
        if not isinstance(files, tuple) or not all(isinstance(file, FileEdits) for file in files):
            raise self.failure("has no FILES", "FILES, a tuple of FileEdits")
        for file in files:
            if file.package not in PACKAGES:  # it would be skipped, because no tree has it
                raise self.failure(f"edits {file.path}", f"a file of {' or '.join(PACKAGES)}")
            if odd := [edit for edit in file.edits if not isinstance(edit, Edit)]:
                raise self.failure(f"has {odd[0]!r:.80} among its edits", "instances of Edit")
        return files

    def load_codemod(self) -> Codemod:
        """Return the rule of a codemod entry; TableError if its source does not define one."""
        module = self._module()
        codemod = getattr(module, "CODEMOD", getattr(module, "SWEEP", None))
        if isinstance(codemod, Codemod):
            return codemod
        raise self.failure("has no CODEMOD", "CODEMOD, a Codemod")

    def failure(self, fault: str, expected: str = "a patch that runs") -> TableError:
        """Return the error for the entry's source."""
        text = " ".join(fault.split())
        return TableError(
            f"{self.source} {text}",
            expected=expected,
            help="Correct the patch; `git diff` shows the changes to it. Nothing was written",
        )

    def _module(self) -> ModuleType:
        """Run the current source; cached bytecode may be outdated."""
        module = ModuleType(f"mqo_patch_{self.name}")
        try:
            code = compile(self.source.read_bytes(), str(self.source), "exec")
            exec(code, module.__dict__)
        except Stop:
            raise
        except (Exception, SystemExit) as error:
            raise self.failure(f"fails ({type(error).__name__}: {error})") from error
        return module


@dataclass(frozen=True)
class SeriesTable:
    """The content of series.toml, apart from its schema."""

    entry: tuple[dict, ...]
    supported: str = ""


@dataclass(frozen=True)
class Series:
    """All entries, in the order of application.

    `ours` is the folder of this project's own files, and `shared` the tree that all runs share. In
    a clone both are one folder. The shared tree already has the files of "add" entries, and imports
    the installed mqo, so these files are copied only to other trees; without `ours`, to none.
    `supported` is the range of upstream releases that the series was verified on, "" for
    any: it distinguishes a release that does not need an entry from one that was not tried.
    """

    entries: tuple[Entry, ...]
    supported: str = ""
    ours: Path | None = None
    shared: Path | None = None

    @classmethod
    def load(cls, folder: Path, ours: Path | None = None) -> Series:
        """Read `folder`/series.toml; TableError if it, or a file that it names, is invalid."""
        path = folder / "series.toml"
        table = read_table(path, SeriesTable, SCHEMA)
        check_specifier(table.supported, path, "supported")
        entries: list[Entry] = []
        for number, row in enumerate(table.entry, start=1):
            where = f"entry {reprlib.repr(row.get('name', number))}"
            entry = build(Entry, row, path, where, folder=folder)
            _check_entry(entry, path, where, [known.name for known in entries])
            _check_files(entry, path, where, ours)
            entries.append(entry)
        return cls(tuple(entries), table.supported, ours)

    @classmethod
    def of_project(cls, project: Project) -> Series:
        """Return the project's series, for its own tree and for others."""
        return replace(cls.load(project.patches, ours=project.ours), shared=project.tree)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the entries."""
        return tuple(entry.name for entry in self.entries)

    def __getitem__(self, name: str) -> Entry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise UnknownNameError("patch", name, self.names)

    def check_names(self, names: Collection[str]) -> None:
        """Raise UnknownNameError for a name that no entry has."""
        for name in names:
            self[name]

    def supports(self, version: str) -> bool:
        """Return whether the series was verified on upstream release `version`."""
        return covers(self.supported, version)

    def only(self, names: Collection[str]) -> Series:
        """Return the named entries, in the series' order; unknown names are ignored."""
        return replace(self, entries=tuple(e for e in self.entries if e.name in names))

    def without(self, *names: str) -> Series:
        """Return the series without the named entries and those that require one of them."""
        dropped = {self[name].name for name in names}
        dropped |= {e.name for e in self.entries if dropped & self.with_required([e.name])}
        return self.only(set(self.names) - dropped)

    def with_required(self, names: Collection[str]) -> set[str]:
        """Return the names of these entries and of all that they require."""
        wanted: set[str] = set()
        todo = list(names)
        while todo:
            entry = self[todo.pop()]
            wanted.add(entry.name)
            todo += [name for name in entry.requires if name not in wanted]
        return wanted

    def placed_files(self, entry: Entry, root: Path) -> dict[str, bytes]:
        """Return {path: content} of an "add" entry's files, for a tree at `root` without them."""
        own = [folder.resolve() for folder in (self.ours, self.shared) if folder]
        if self.ours is None or root.resolve() in own:
            return {}
        return added_files(entry, self.ours)


def added_files(entry: Entry, root: Path) -> dict[str, bytes]:
    """Return {path in a tree: content} of an "add" entry's files.

    They are those of the installed mqo if it has them, otherwise those at `root`.
    """
    files = {}
    for name in entry.files:
        start = runtime.origin(name) or root / name
        for path in source_files(start):
            files[(PurePosixPath(name) / path.relative_to(start)).as_posix()] = path.read_bytes()
    return files


def source_files(start: Path) -> list[Path]:
    """Return the files in a folder, sorted, without bytecode; `start` itself if it is a file."""
    paths = (start, *sorted(start.rglob("*")))
    return [path for path in paths if path.is_file() and "__pycache__" not in path.parts]


def _check_entry(entry: Entry, path: Path, where: str, above: Collection[str]) -> None:
    """Refuse a bad or repeated name, a bad range, and a required entry that comes later."""
    check_text(NAME, entry.name, path, f"{where}: name", "quant_sites")
    check_specifier(entry.upstream, path, f"{where}: upstream")
    if entry.name in above:
        raise refusal(path, f"{where}: two entries have that name", "unique names")
    if not entry.reason.strip():
        raise refusal(path, f"{where}: an empty reason", "why upstream needs it")
    for name in entry.requires:
        if name not in above:
            listed = f"one of the entries above it: {', '.join(above) or 'none'}"
            raise refusal(path, f"{where}: requires {name!r}", listed)


def _check_files(entry: Entry, path: Path, where: str, ours: Path | None) -> None:
    """Refuse an entry whose source, or whose files in `ours`, do not exist."""
    if (entry.kind == "add") != bool(entry.files):
        raise refusal(path, f"{where}: files = {list(entry.files)}", "files only for kind 'add'")
    if entry.kind != "add" and not entry.source.is_file():
        raise refusal(path, f"{where}: {entry.source} does not exist", "the entry's patch")
    for name in entry.files:
        inside = PurePosixPath(name)
        first = inside.parts[0] if inside.parts else "."
        hidden = first.startswith(".") and first != FOLDER  # .git, .mqo
        outside = inside.is_absolute() or ".." in inside.parts
        if hidden or outside or any(PurePosixPath(p).is_relative_to(inside) for p in PACKAGES):
            raise refusal(path, f"{where}: files has {name!r}", "such as 'megatron/extra.py'")
        start = runtime.origin(name) or (ours / name if ours else None)
        if start and not os.path.exists(start):  # noqa: PTH110 - false for any text
            raise refusal(path, f"{where}: {name!r} does not exist in {ours}", "a file or folder")
