"""Find the quantizers that installed packages offer, without importing a package.

A package names a module with quantizers as an entry point of the group `mqo.quantizers`:

    [project.entry-points."mqo.quantizers"]
    mine = "package.module"
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, entry_points
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from mqo.errors import PluginError

GROUP = "mqo.quantizers"


@dataclass(frozen=True)
class QuantizerPackage:
    """An entry point, and the distribution that has it."""

    name: str
    module: str
    distribution: Distribution

    @classmethod
    def of_entry(cls, entry: EntryPoint) -> QuantizerPackage:
        """Return an entry point with the value 'module' or 'module:function'."""
        assert entry.dist is not None  # entry points of distributions
        return cls(entry.name, entry.value.partition(":")[0].strip(), entry.dist)

    @property
    def label(self) -> str:
        """Return the distribution and its version."""
        return f"{self.distribution.name} {self.distribution.version}"

    def file(self) -> Path:
        """Return the file of the module.

        Raises:
            PluginError: the distribution does not say where it is, or it is not in a package.
        """
        parts = self.module.split(".")
        subject = f"The quantizers {self.name} of {self.label} are in the module {self.module}"
        if not all(part.isidentifier() for part in parts):
            raise PluginError(f"{subject}, which is not a name", expected="package.module")
        folders = list(_folders(self.distribution))
        for folder in folders:
            path = folder.joinpath(*parts)
            for file in (path / "__init__.py", path.with_suffix(".py")):
                if not file.is_file():
                    continue
                for parent in file.parents[: len(file.relative_to(folder).parts) - 1]:
                    if not (parent / "__init__.py").is_file():
                        raise PluginError(
                            f"{subject}, and {parent} has no __init__.py",
                            expected="a package with __init__.py in each folder",
                        )
                return file
        raise PluginError(
            f"{subject}, which is not in {' or '.join(map(str, folders))}",
            expected="a package that is installed as files, or --plugin FILE",
        )


def packages() -> list[QuantizerPackage]:
    """Return the entry points of all installed distributions, sorted by name."""
    entries = entry_points(group=GROUP)
    return sorted(map(QuantizerPackage.of_entry, entries), key=lambda p: (p.name, p.label))


def files_of(words: Iterable[Path] | None) -> tuple[Path, ...]:
    """Return the files that the words of --plugin name."""
    return tuple(map(file_of, words or ()))


def file_of(word: Path) -> Path:
    """Return a file, or the file of the entry point with this name if there is no such file.

    Raises:
        PluginError: there is neither, or two distributions have this name.
    """
    if _is_there(word):
        return word
    known = packages()
    named = [package for package in known if package.name == str(word)]
    if len(named) > 1:
        labels = " and ".join(package.label for package in named)
        raise PluginError(f"{labels} both offer quantizers {word}", expected="--plugin FILE")
    if named:
        return named[0].file()
    if word.suffix == ".py" or len(word.parts) != 1:
        return word  # the name of a file, which is missing
    names = ", ".join(dict.fromkeys(package.name for package in known))
    raise PluginError(
        f"There is no file {word}, and no installed package offers quantizers of this name",
        expected=f"a file of Python, or one of {names}" if names else "a file of Python",
    )


def _is_there(word: Path) -> bool:
    """Return whether a word is the name of a file, which need not be a regular one."""
    try:
        return word.exists() and not word.is_dir()
    except OSError:  # too long for a name
        return False


def _folders(distribution: Distribution) -> Iterator[Path]:
    """Yield the folders that may hold a distribution's modules."""
    yield Path(str(distribution.locate_file("")))
    if text := distribution.read_text("direct_url.json"):
        try:
            facts = json.loads(text)
            url, editable = urlsplit(facts["url"]), facts.get("dir_info", {}).get("editable")
        except (ValueError, TypeError, KeyError, AttributeError):
            return
        if url.scheme == "file" and editable is True:
            project = Path(url2pathname(url.path))
            yield from (project / "src", project)
