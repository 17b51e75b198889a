"""Record the installed packages that a process has loaded: a rerun needs the same versions."""

import csv
import json
import os
import sys
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
        if _is_loaded(distribution, files, modules):
            about = distribution.metadata
            versions.setdefault(about["Name"], about["Version"])  # the path's first is imported
    versions.pop("mqo", None)
    return dict(sorted(versions.items()))


def _is_loaded(distribution: Distribution, files: set[str], modules: set[str]) -> bool:
    """Return whether one of its files is loaded; if it lists none, one of its modules."""
    root, lists_files = os.path.realpath(str(distribution.locate_file(""))), False
    for row in csv.reader((distribution.read_text("RECORD") or "").splitlines()):
        if row and (row[0].endswith(".py") or ".so" in row[0]):
            lists_files = True
            if f"{root}/{row[0]}" in files:
                return True
    return not lists_files and not modules.isdisjoint(_module_names(distribution))


def _loaded_files() -> set[str]:
    """Return the paths of this process's modules and shared libraries, in resolved folders."""
    paths = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    maps = Path("/proc/self/maps")
    if maps.exists():
        fields = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
        paths |= {parts[5] for parts in fields if len(parts) == 6 and ".so" in parts[5]}
    names = [os.path.split(path) for path in paths if path]
    # Thousands of files are in some hundred folders.
    folders = {folder: os.path.realpath(folder) for folder in {folder for folder, _ in names}}
    return {f"{folders[folder]}/{name}" for folder, name in names}


def _module_names(distribution: Distribution) -> list[str]:
    """Return the names of its modules: those that it lists, else its own name."""
    listed = (distribution.read_text("top_level.txt") or "").split()
    return listed or [distribution.metadata["Name"].replace("-", "_")]
