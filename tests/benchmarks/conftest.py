"""The benchmarks' modules, which are programs beside one another and no package."""

from importlib import import_module

import pytest
from mqo.project import Project


@pytest.fixture(scope="module")
def benchmark_module():
    """A function that imports a benchmark by name, as its program would import it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Project.here().root / "benchmarks")
        yield import_module
