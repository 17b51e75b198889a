"""What tests of several folders share: the vendored tree, for reading only, and a browser."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import settings
from mqo import process
from mqo.overlay.tree import Tree
from mqo.project import Project
from mqo.quant.formats import FORMATS
from mqo.quant.own_formats import OWN
from mqo.quant.plugins import PLUGINS

from . import forking
from .real_runs import Starter

HERE = Path(__file__).parent
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
WAYS = "`apt-get install chromium-headless-shell`, or `playwright install chromium`"

# A shell's job in the background ignores these, and what the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A machine may be busy: no test is to fail for its time.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


def pytest_collection_modifyitems(items):
    """The files right here train for real: begun first, none of them is left over at the end."""
    items.sort(key=lambda item: item.path.parent != HERE)


@pytest.fixture(autouse=True)
def _no_type_of_a_user_left():
    yield
    PLUGINS.clear()
    for name in OWN:
        del FORMATS[name]
    OWN.clear()


@pytest.fixture(scope="session", autouse=True)
def _no_formats_of_the_users(tmp_path_factory):
    """The formats in a developer's ~/.config/mqo are no types of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _without_sync():
    """Syncing helps against power cuts, not kills, and disks are slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def forked():
    """What the launcher starts is forked, where that is a Python program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "spawn", forking.popen)
        yield
    forking.stop()


@pytest.fixture
def fresh(monkeypatch):
    """What the launcher starts is a process from scratch, as users have it."""
    monkeypatch.setattr(process, "spawn", forking.fresh)


@pytest.fixture(scope="session")
def checkout_with():
    """A function that makes the checkout with some folders elsewhere: `runs=PATH`, `cache=PATH`."""

    def make(**folders):
        places = {name: property(lambda self, path=path: path) for name, path in folders.items()}
        return type("CheckoutWith", (Project,), places)(Project.here().root)

    return make


@pytest.fixture(scope="session")
def start(tmp_path_factory, checkout_with):
    """A function that runs a cell for real, each one once; `real_runs` has it."""
    return Starter(checkout_with(runs=tmp_path_factory.mktemp("runs of the tests")))


@pytest.fixture(scope="session")
def vendored():
    """The checkout's Megatron tree, materialized and patched; skips where it is not."""
    tree = Tree(Project.here().tree)
    if not (tree.root / "megatron" / "core").exists():
        pytest.skip("Megatron-LM/megatron/core is not there: run `mqo vendor` and `mqo apply`")
    if tree.manifest() is None:
        pytest.skip("Megatron-LM is not patched: run `mqo apply`")
    return tree


@pytest.fixture(scope="module")
def browser():
    """A Chromium without a window."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        found = next(filter(None, map(shutil.which, BROWSERS)), driver.chromium.executable_path)
        if not Path(found).exists():
            pytest.skip(f"there is no Chromium: {WAYS}")
        with driver.chromium.launch(executable_path=found) as started:
            yield started
