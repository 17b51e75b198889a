"""Record the installed packages that a process has loaded: a rerun needs the same versions."""

import csv
import json
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from mqo.megatron.run.files import run_folder
from mqo.megatron.run.ranks import rank


def record_packages() -> None:
    """Write packages.json: {name: version} of the packages that rank 0 has loaded."""
    folder = run_folder()
    if folder is not None and rank() == 0:
        folder.packages.write_text(json.dumps(loaded_packages(), indent=1), encoding="utf-8")


def loaded_packages() -> dict[str, str]:
    """Return {name: version} of the distributions with a loaded file.

    The file is a Python module or a shared library: wheels of CUDA libraries have no module. A
    distribution that lists no files counts if its module is loaded. mqo itself does not count,
    because a run imports the copy in its source.
    """
    files = _loaded_files()
    modules = {name.partition(".")[0] for name in sys.modules}
    versions: dict[str, str] = {}
    for distribution in distributions():
        listed = set(_listed_files(distribution))
        loaded = listed & files if listed else set(_module_names(distribution)) & modules
        if loaded and distribution.metadata["Name"] != "mqo":
            versions.setdefault(
                distribution.metadata["Name"], distribution.version
            )  # the first on the path is imported
    return dict(sorted(versions.items()))


def _loaded_files() -> set[str]:
    """Return the resolved paths of the modules and shared libraries of this process."""
    paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    maps = Path("/proc/self/maps")
    if maps.exists():
        fields = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
        paths |= {parts[5] for parts in fields if len(parts) == 6 and ".so" in parts[5]}
    return {str(Path(path).resolve()) for path in paths if path}


def _listed_files(distribution: Distribution) -> Iterator[str]:
    """Yield the absolute paths of the Python files and libraries in its RECORD."""
    root = Path(str(distribution.locate_file(""))).resolve()
    for row in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        if row and (row[0].endswith(".py") or ".so" in row[0]):
            yield str(root / row[0])


def _module_names(distribution: Distribution) -> list[str]:
    """Return the names of its modules: those that it lists, else its own name."""
    listed = (distribution.read_text("top_level.txt") or "").split()
    return listed or [distribution.metadata["Name"].replace("-", "_")]
