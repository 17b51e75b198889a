"""Which installed packages a process has loaded."""

import ctypes
import json
import shutil
import sys
from importlib import import_module
from pathlib import Path

import pytest
from mqo.megatron.run.packages import loaded_packages, record_packages


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that installs a package of given files, as pip does; their folder."""
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))

    def install(name, *files, record=True, top_level=""):
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        if record:
            (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
        if top_level:
            (info / "top_level.txt").write_text(top_level)
        for file in files:
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            (site / file).write_text("")
        return site

    yield install
    for name in [name for name in sys.modules if name.startswith("space")]:
        del sys.modules[name]


def ours():
    return {name for name in loaded_packages() if name.startswith(("one", "other"))}


def test_a_package_counts_once_a_module_of_it_is_imported(install):
    install("one", "space_one/__init__.py")
    install("other", "space_other/__init__.py")
    assert ours() == set()
    import_module("space_one")
    assert ours() == {"one"}


def test_of_a_namespace_that_packages_share_only_the_imported_one_counts(install):
    install("one", "space_shared/one.py")
    install("other", "space_shared/other.py")
    import_module("space_shared.one")
    assert ours() == {"one"}


def test_a_package_without_a_module_counts_if_its_library_is_loaded(install):
    """As the wheels of CUDA's libraries."""
    name = "space/lib/libone.so.12"
    library = install("one", name) / name
    install("other", "space/lib/libother.so.12")
    files = (str(getattr(module, "__file__", "")) for module in sys.modules.values())
    extensions = [Path(file) for file in files if file.endswith(".so")]
    shutil.copyfile(min(extensions, key=lambda path: path.stat().st_size), library)
    assert ours() == set()
    ctypes.CDLL(str(library))
    assert ours() == {"one"}


@pytest.mark.parametrize("top_level", ["space_one\n", ""])
def test_a_package_that_lists_no_files_counts_by_its_modules(install, top_level, monkeypatch):
    install("one", record=False, top_level=top_level)
    install("other", record=False)
    assert ours() == set()
    monkeypatch.setitem(sys.modules, "space_one" if top_level else "one", sys)
    assert ours() == {"one"}


def test_a_run_records_them_in_its_folder(run):
    folder = run()
    record_packages()
    recorded = json.loads((folder / "packages.json").read_text())
    assert "torch" in recorded
    assert "mqo" not in recorded  # which is loaded here, and which a run has a copy of
